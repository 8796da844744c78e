"""MultiheadAttention: every option and form of call, torch's class beside ours.

On the CPU ours is torch's own code. With `fused` CPU tensors go the way that CUDA ones go, packed
product, side weights and autograd node included, with torch's CPU operator in the core's place.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hfai
from hfai.kernels import jit
from hfai.kernels.mha import call, dispatch
from hfai.kernels.mha.call import Options
from hfai.nn import to_hfai
from tests.kernels.compiled import DEVICES
from tests.nn.operator_cases import assert_same_bits

E, H, B, L, S = 32, 4, 3, 8, 5


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send CPU tensors the way of CUDA ones."""
    monkeypatch.setattr(call, "also_on_cpu", True)
    monkeypatch.setattr(dispatch, "LEAST_WORK_IN_INFERENCE", 0)
    monkeypatch.setattr(dispatch, "LEAST_WORK_WITHOUT_WEIGHTS", 0)
    monkeypatch.setattr(dispatch, "INSTEAD_OF_ONE_OPERATOR", True)


def pair(*arguments: Any, **keywords: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """Return torch's module and ours with the same parameters."""
    torchs = nn.MultiheadAttention(*(arguments or (E, H)), **keywords)
    with torch.no_grad():
        for parameter in torchs.parameters():
            parameter.uniform_(-0.3, 0.3)
    return torchs, to_hfai(copy.deepcopy(torchs))


def results(
    module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], through_weights: bool, **options: Any
) -> list[Tensor | None]:
    """Return output, weights, and the gradients of distinct inputs and of parameters."""
    y, weights = module(*inputs, **options)
    loss = (y * torch.arange(y.numel()).view(y.shape).sin()).sum()
    if through_weights:
        loss = loss + (weights * torch.arange(weights.numel()).view(weights.shape).cos()).sum()
    leaves = list({id(x): x for x in inputs}.values())
    return [y, weights, *torch.autograd.grad(loss, [*leaves, *module.parameters()])]


def assert_close(ours: list[Tensor | None], torchs: list[Tensor | None]) -> None:
    for one, other in zip(ours, torchs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, equal_nan=True)


def is_covered(module: nn.MultiheadAttention, *inputs: Tensor, **options: Any) -> bool:
    """Return whether a call goes our way and not torch's."""
    given = Options(None, True, None, True, False)._replace(**options)
    return call.attend(module, *inputs, given) is not None


def masks(kind: str, keys: int) -> dict[str, Any]:
    """Return the keywords of one kind of mask; no row is without a key."""
    padding = torch.rand(B, keys) < 0.4
    blocked = torch.rand(L, keys) < 0.4
    padding[:, 0] = blocked[:, 0] = False
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.randn(B, keys)},
        "bool": {"attn_mask": blocked},
        "float": {"attn_mask": torch.randn(L, keys)},
        "of each head": {"attn_mask": torch.randn(B * H, L, keys)},
        "both": {"attn_mask": blocked, "key_padding_mask": padding},
        "causal": {"attn_mask": torch.ones(L, keys, dtype=torch.bool).triu(1), "is_causal": True},
    }[kind]


KINDS = [
    "none", "padding", "float padding", "bool", "float", "of each head", "both", "causal",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", ["q = k = v", "k = v", "three"])
def test_outputs_weights_and_gradients_are_torchs(fused: None, inputs: str, kind: str) -> None:
    for batch_first, bias in itertools.product((True, False), (True, False)):
        torchs, ours = pair(E, H, batch_first=batch_first, bias=bias)
        keys = L if inputs == "q = k = v" else S
        query = _leaf(L, batch_first)
        key = query if inputs == "q = k = v" else _leaf(S, batch_first)
        value = _leaf(S, batch_first) if inputs == "three" else key
        options = masks(kind, keys)
        for need_weights, through in ((True, False), (True, True), (False, False)):
            options["need_weights"] = need_weights
            given = (query, key, value)
            assert is_covered(ours, *given, **options)
            expected = results(torchs, given, through, **options)
            assert_close(results(ours, given, through, **options), expected)


def _leaf(length: int, batch_first: bool, width: int = E) -> Tensor:
    shape = (B, length, width) if batch_first else (length, B, width)
    return torch.randn(shape).requires_grad_()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_keys_and_values_may_have_widths_of_their_own(
    fused: None, batch_first: bool, need_weights: bool
) -> None:
    torchs, ours = pair(E, H, kdim=12, vdim=20, batch_first=batch_first)
    inputs = (_leaf(L, batch_first), _leaf(S, batch_first, 12), _leaf(S, batch_first, 20))
    options = {"need_weights": need_weights}
    assert is_covered(ours, *inputs, **options)
    assert_close(results(ours, inputs, False, **options), results(torchs, inputs, False, **options))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["none", "padding", "of each head"])
def test_unbatched_inputs_are_torchs(fused: None, kind: str, need_weights: bool) -> None:
    torchs, ours = pair()
    query, key = torch.randn(L, E).requires_grad_(), torch.randn(S, E).requires_grad_()
    options: dict[str, Any] = {"need_weights": need_weights}
    if kind == "padding":
        options["key_padding_mask"] = torch.arange(S) > 2
    if kind == "of each head":
        options["attn_mask"] = torch.randn(H, L, S)
    for inputs in ((query, query, query), (query, key, key)):
        if inputs[1] is query and kind != "none":
            continue
        assert is_covered(ours, *inputs, **options)
        expected = results(torchs, inputs, False, **options)
        assert_close(results(ours, inputs, False, **options), expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_that_lie_the_other_way_round_are_read_as_they_lie(
    fused: None, batch_first: bool
) -> None:
    torchs, ours = pair(E, H, batch_first=batch_first)
    x = _leaf(L, not batch_first)
    transposed = x.transpose(0, 1)
    given = (transposed, transposed, transposed)
    assert_close(list(ours(*given)), list(torchs(*given)))
    strided = torch.randn(*x.shape, 2)[..., 0]
    assert_close(list(ours(strided, strided, strided)), list(torchs(strided, strided, strided)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_without_any_key_are_what_torch_makes_of_them(
    fused: None, need_weights: bool, training: bool
) -> None:
    torchs, ours = (module.train(training) for module in pair(E, H, batch_first=True))
    x = torch.randn(B, L, E)
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[1] = True
    blocked = torch.zeros(L, L, dtype=torch.bool)
    blocked[2] = True
    for grad, options in itertools.product(
        (True, False), ({"key_padding_mask": padding}, {"attn_mask": blocked})
    ):
        with torch.set_grad_enabled(grad):
            expected = torchs(x, x, x, need_weights=need_weights, **options)
            found = ours(x, x, x, need_weights=need_weights, **options)
        assert is_covered(ours, x, x, x, need_weights=need_weights, **options)
        assert_close(list(found), list(expected))


def test_a_row_without_keys_poisons_no_gradient_where_no_weights_are_asked_for(
    fused: None,
) -> None:
    _, ours = pair(E, H, batch_first=True)
    x = _leaf(L, True)
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[1] = True
    y, _ = ours(x, x, x, key_padding_mask=padding, need_weights=False)
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({"add_bias_kv": True}, {}),
        ({"add_zero_attn": True}, {}),
        ({"add_bias_kv": True, "add_zero_attn": True}, {"need_weights": False}),
        ({"dropout": 0.5}, {}),
        ({}, {"average_attn_weights": False}),
        ({"dropout": 0.5}, {"average_attn_weights": False}),
    ],
)
def test_what_is_not_covered_is_torchs_to_the_bit(
    fused: None, keywords: dict[str, Any], options: dict[str, Any]
) -> None:
    torchs, ours = pair(E, H, batch_first=True, **keywords)
    x = _leaf(L, True)
    found = []
    for module in (torchs, ours):
        torch.manual_seed(3)
        found.append(results(module, (x, x, x), False, **options))
    assert not is_covered(ours, x, x, x, **options)
    assert_same_bits(found[1], found[0])


def test_dropout_without_weights_draws_anew_and_repeats_by_seed(fused: None) -> None:
    _, ours = pair(E, H, dropout=0.5)
    x = _leaf(L, False)

    def run(seed: int) -> list[Tensor | None]:
        torch.manual_seed(seed)
        return results(ours, (x, x, x), False, need_weights=False)

    assert is_covered(ours, x, x, x, need_weights=False)
    assert_same_bits(run(1), run(1))
    assert not torch.equal(run(1)[0], run(2)[0])  # type: ignore[arg-type]
    ours.eval()
    assert_same_bits(run(1), run(2))


def test_a_learnable_mask_gets_its_gradient(fused: None) -> None:
    torchs, ours = pair()
    x = _leaf(L, False)
    for shape in ((L, L), (B * H, L, L)):
        gradients = []
        for module in (torchs, ours):
            mask = torch.ones(shape).requires_grad_()
            module(x, x, x, attn_mask=mask)[0].square().sum().backward()
            gradients.append(mask.grad)
        assert_same_bits(gradients[1], gradients[0])


def test_gradients_of_gradients_and_through_weights_alone_are_right(fused: None) -> None:
    x = _leaf(L, False)
    penalties = []
    for module in pair():
        y, weights = module(x, x, x)
        (gradient,) = torch.autograd.grad(
            y.square().sum() + weights.square().sum(), x, create_graph=True
        )
        penalties.append([*torch.autograd.grad(gradient.square().sum(), [x, *module.parameters()])])
        _, weights = module(x, x, x)
        penalties[-1] += torch.autograd.grad(weights.square().sum(), [x, module.in_proj_weight])
    for one, other in zip(*penalties, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_weights_may_be_used_or_left_alone(fused: None) -> None:
    _, ours = pair()
    x = _leaf(L, False)
    y, weights = ours(x, x, x)
    assert weights.requires_grad
    (both,) = torch.autograd.grad(y.sum() + 0 * weights.sum(), x, retain_graph=True)
    (alone,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-5)


def test_whichever_leaf_asks_for_a_gradient_gets_it(fused: None) -> None:
    torchs, ours = pair(E, H, batch_first=True)
    leaves = [(L, "query"), (S, "key"), (S, "value")]
    for wanted in range(3):
        inputs = [torch.randn(B, length, E) for length, _ in leaves]
        gradients = []
        for module in (torchs, ours):
            module.requires_grad_(False)
            given = [x.clone().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
            y, weights = module(*given)
            loss = y.square().sum() + (weights.square().sum() if weights.requires_grad else 0)
            gradients.append(torch.autograd.grad(loss, given[wanted])[0])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_autocast_gives_torchs_types_and_values(fused: None) -> None:
    torchs, ours = pair(E, H, batch_first=True)
    x = _leaf(L, True)
    for need_weights in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            assert is_covered(ours, x, x, x, need_weights=need_weights)
            expected = torchs(x, x, x, need_weights=need_weights)
            found = ours(x, x, x, need_weights=need_weights)
        assert found[0].dtype == expected[0].dtype == torch.bfloat16
        torch.testing.assert_close(found[0], expected[0], rtol=5e-2, atol=5e-2)
        if need_weights:
            torch.testing.assert_close(found[1].float(), expected[1].float(), rtol=0, atol=2e-2)


REFUSED: list[tuple[str, Callable[[nn.Module, Tensor], Any]]] = [
    ("another width", lambda m, x: m(x[..., :5], x[..., :5], x[..., :5])),
    ("another length of values", lambda m, x: m(x, x, x[:3])),
    ("another batch", lambda m, x: m(x, x[:, :2], x[:, :2])),
    ("four dimensions", lambda m, x: m(x[None], x[None], x[None])),
    ("query unbatched alone", lambda m, x: m(x[:, 0], x, x)),
    ("the hint without a mask", lambda m, x: m(x, x, x, is_causal=True)),
    ("an integer mask", lambda m, x: m(x, x, x, attn_mask=torch.ones(L, L, dtype=torch.int))),
    ("a mask of another size", lambda m, x: m(x, x, x, attn_mask=torch.ones(L, L + 1) > 2)),
    ("padding of another size", lambda m, x: m(x, x, x, torch.ones(B + 1, L) > 2)),
    ("another type", lambda m, x: m(x.double(), x.double(), x.double())),
    ("no tensors", lambda m, x: m(1, 2, 3)),
    ("a list as a mask", lambda m, x: m(x, x, x, [[False] * L] * B)),
    ("a list as a mask in evaluation", lambda m, x: m.eval()(x, x, x, attn_mask=[[False] * L])),
]


@pytest.mark.parametrize(("what", "wrong"), REFUSED, ids=[what for what, _ in REFUSED])
def test_what_torch_refuses_is_refused_in_torchs_words(
    fused: None, what: str, wrong: Callable[[nn.Module, Tensor], Any]
) -> None:
    found = []
    for module in pair():
        with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever torch raises)
            wrong(module, torch.randn(L, B, E))
        found.append((type(caught.value), str(caught.value)))
    assert found[1] == found[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_scripting_compiles_torchs_own_code() -> None:
    torchs, ours = pair()
    x = torch.randn(L, B, E)
    assert_same_bits(list(torch.jit.script(ours)(x, x, x)), list(torchs(x, x, x)))


def test_masks_of_two_kinds_warn_as_torch_does(fused: None) -> None:
    _, ours = pair()
    x = torch.randn(L, B, E)
    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
        ours(x, x, x, torch.zeros(B, L, dtype=torch.bool), attn_mask=torch.zeros(L, L))


@pytest.mark.parametrize("empty", ["batch", "keys"])
def test_nothing_in_gives_what_torch_gives(fused: None, empty: str) -> None:
    torchs, ours = pair()
    x = torch.randn(L, B, E)
    given = (x[:, :0],) * 3 if empty == "batch" else (x, x[:0], x[:0])
    assert_same_bits(list(ours(*given)), list(torchs(*given)))


class _Adapted(nn.Linear):
    """What a LoRA library puts in a Linear's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.load_state_dict(base.state_dict())


def test_an_adapter_or_a_hook_on_out_proj_takes_torchs_way(fused: None) -> None:
    x = torch.randn(L, B, E)
    for change in ("class", "hook", "parametrization"):
        torchs, ours = pair()
        for module in (torchs, ours):
            if change == "class":
                module.out_proj = _Adapted(module.out_proj)  # type: ignore[assignment]
            elif change == "hook":
                module.out_proj.register_forward_hook(lambda *given: None)
            else:
                nn.utils.parametrizations.weight_norm(module.out_proj)
        assert not is_covered(ours, x, x, x)
        assert "out_proj" in str(call.why_not_covered(ours))
        assert_same_bits(list(ours(x, x, x)), list(torchs(x, x, x)))


def test_weights_that_something_else_computes_are_read_and_get_gradients(fused: None) -> None:
    torchs, ours = pair()
    x = torch.randn(L, B, E)
    for module in (torchs, ours):
        prune.l1_unstructured(module, "in_proj_weight", amount=0.5)
    # What prune leaves is a plain tensor, not a parameter.
    assert is_covered(ours, x, x, x)
    gradients = []
    for module in (torchs, ours):
        module(x, x, x)[0].square().sum().backward()
        gradients.append(module.in_proj_weight_orig.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_a_pickle_from_before_there_were_separate_widths_is_read() -> None:
    _, ours = pair()
    state = ours.__getstate__() if hasattr(ours, "__getstate__") else ours.__dict__
    state = dict(state)
    del state["_qkv_same_embed_dim"]
    old = type(ours).__new__(type(ours))
    old.__setstate__(pickle.loads(pickle.dumps(state)))
    x = torch.randn(L, B, E)
    assert_same_bits(list(old(x, x, x)), list(ours(x, x, x)))


@pytest.mark.parametrize("need_weights", [True, False])
def test_compiled_calls_go_our_way_in_one_graph(fused: None, need_weights: bool) -> None:
    torch._dynamo.reset()
    torchs, ours = pair(E, H, batch_first=True)
    x = _leaf(L, True)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    options = {"need_weights": need_weights}
    expected = results(torchs, (x, x, x), need_weights, **options)
    y, weights = compiled(x, x, x, **options)
    assert_close([y, weights], expected[:2])
    assert len(graphs) == 1
    assert "scaled_dot_product_attention" in graphs[0]
    assert "contiguous" not in graphs[0].split("scaled_dot_product_attention")[0]
    torch._dynamo.reset()


def test_the_module_is_explained_as_a_whole() -> None:
    rows = hfai.explain(to_hfai(nn.Sequential(nn.MultiheadAttention(E, H), nn.Linear(E, E))))
    assert [row.layer for row in rows] == ["MultiheadAttention"]
    assert rows.others == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"dtype": torch.float64}, "float64"),
        ({"embed_dim": 12}, "head dimension of 3"),
        ({"embed_dim": 2048}, "head dimension of 512"),
    ],
)
def test_what_is_torchs_is_named_with_the_reason(keywords: dict[str, Any], words: str) -> None:
    given = {"embed_dim": E, "num_heads": H} | keywords
    _, ours = pair(given.pop("embed_dim"), given.pop("num_heads"), **given)
    assert words in str(call.why_not_covered(ours))


def test_small_inputs_in_inference_are_torchs(fused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LEAST_WORK_IN_INFERENCE", B * L * E**2 + 1)
    torchs, ours = pair(E, H, batch_first=True)
    x, key = torch.randn(B, L, E), torch.randn(B, S, E)
    for training, given in itertools.product((True, False), ((x, x, x), (x, key, key))):
        torchs.train(training), ours.train(training)
        assert is_covered(ours, *given)
        with torch.no_grad():
            assert not is_covered(ours, *given)
            assert_same_bits(list(ours(*given)), list(torchs(*given)))
    ours.requires_grad_(False)
    assert not is_covered(ours, x, x, x)
    assert is_covered(ours, x.requires_grad_(), x, x)
    monkeypatch.setattr(dispatch, "LEAST_WORK_IN_INFERENCE", B * L * E**2)
    with torch.no_grad():
        assert is_covered(ours, x, x, x)


def test_torchs_one_operator_for_evaluation_is_left_alone_where_it_is_faster(
    fused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "INSTEAD_OF_ONE_OPERATOR", False)
    monkeypatch.setattr(dispatch, "MOST_ROWS_FORWARD", L - 1)
    torchs, ours = (module.eval() for module in pair(E, H, batch_first=True))
    x, key = torch.randn(B, L, E), torch.randn(B, S, E)
    assert is_covered(ours, x, x, x)
    with torch.no_grad():
        assert not is_covered(ours, x, x, x, need_weights=False)
        assert_same_bits(
            [ours(x, x, x, need_weights=False)[0]], [torchs(x, x, x, need_weights=False)[0]]
        )
        # Which torch makes of several operators:
        assert is_covered(ours, x, key, key, need_weights=False)
        assert is_covered(ours, x, x, x)  # with weights ours is the faster, if the call is large


def test_a_checkpoint_with_dropout_draws_the_same_without_gradients_and_with(
    fused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LEAST_WORK_IN_INFERENCE", 1 << 60)
    _, ours = pair(E, H, batch_first=True, dropout=0.5)
    x = _leaf(L, True)
    found = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert is_covered(ours, x, x, x, need_weights=False)
            torch.manual_seed(3)
            found.append(ours(x, x, x, need_weights=False)[0].detach())
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize(("queries", "keys"), [(257, 8), (8, 257)])
def test_sequences_beyond_the_limit_are_torchs(
    fused: None, monkeypatch: pytest.MonkeyPatch, queries: int, keys: int
) -> None:
    monkeypatch.setattr(dispatch, "LONGEST", 256)
    torchs, ours = pair(E, H, batch_first=True)
    query, key = _leaf(queries, True), _leaf(keys, True)
    for need_weights in (True, False):
        given = {"need_weights": need_weights}
        assert not is_covered(ours, query, key, key, **given)
        assert is_covered(ours, query[:, :8], key[:, :256], key[:, :256], **given)
        expected = results(torchs, (query, key, key), False, **given)
        assert_same_bits(results(ours, (query, key, key), False, **given), expected)
    assert "longer than what was measured" in str(
        dispatch.why_torchs(queries, keys, torch.bfloat16, by_torchs_node=False)
    )


def test_dropped_weights_without_masks_run_here_at_any_length(
    fused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LONGEST", 256)
    _, ours = pair(E, H, batch_first=True, dropout=0.5)
    x = _leaf(300, True)
    assert is_covered(ours, x, x, x, need_weights=False)
    padding = torch.zeros(B, 300, dtype=torch.bool)
    assert not is_covered(ours, x, x, x, need_weights=False, key_padding_mask=padding)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(320, 320), (64, 576)])
def test_lengths_beyond_our_own_kernels_are_right(
    fused: None, queries: int, keys: int, batch_first: bool
) -> None:
    torchs, ours = pair(E, H, batch_first=batch_first)
    query = _leaf(queries, batch_first)
    key = query if queries == keys else _leaf(keys, batch_first)
    padding = torch.arange(keys) >= torch.tensor([[keys], [70], [5]])
    for options in ({}, {"key_padding_mask": padding}, {"need_weights": False}):
        assert is_covered(ours, query, key, key, **options)
        expected = results(torchs, (query, key, key), False, **options)
        for one, other in zip(
            results(ours, (query, key, key), False, **options), expected, strict=True
        ):
            if one is not None and other is not None:
                assert (one - other).norm() <= 1e-4 * other.norm() + 1e-4


@pytest.fixture
def switch() -> Iterator[Any]:
    """torch's place of the switch for TF32, which is set back after the test."""
    place = torch.backends.cuda.matmul
    before = place.allow_tf32
    yield place
    place.allow_tf32 = before


def test_fp32_without_tf32_is_torchs_where_its_products_are(
    switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp32, bf16, rows = torch.float32, torch.bfloat16, dispatch.MANY_ROWS
    monkeypatch.setattr(jit, "why_unavailable", lambda device: None)
    monkeypatch.setattr(jit, "device_limits", lambda device: DEVICES["sm_90"])
    switch.allow_tf32 = False
    assert dispatch.why_not_precision(fp32, rows, 512, 0) is None
    assert dispatch.beats_one_operator(512, 512, fp32, need_weights=False)
    assert "without TF32" in str(dispatch.why_not_precision(fp32, 64, 512, 0))
    assert dispatch.why_not_precision(bf16, 64, 512, 0) is None
    monkeypatch.setattr(jit, "device_limits", lambda device: DEVICES["sm_80"])
    assert "for Hopper" in str(dispatch.why_not_precision(fp32, rows, 512, 0))
    switch.allow_tf32 = True
    assert dispatch.why_not_precision(fp32, rows, 512, 0) is None
    assert dispatch.beats_one_operator(256, 256, fp32, need_weights=False)
    assert not dispatch.beats_one_operator(257, 8, fp32, need_weights=False)


def test_heads_of_sizes_that_no_fused_kernel_takes_are_torchs(fused: None) -> None:
    torchs, ours = pair(12, 4)
    x = torch.randn(L, B, 12)
    assert_same_bits(list(ours(x, x, x)), list(torchs(x, x, x)))
