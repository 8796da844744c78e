"""node.cpp on the host: the C++ call and autograd node, with functions in place of kernels."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels.layer_norm import autograd, programs
from tests.kernels.layer_norm.host_programs import HostConfiguration

LENGTH = 8
SHAPE = (2, 4)


@pytest.fixture(scope="module")
def node() -> ModuleType:
    module = autograd.EXTENSION.wait()
    if module is None:
        pytest.skip(f"needs node.cpp compiled: {autograd.EXTENSION.reason}")
    return module


class Layer:
    """One configuration, its parameters, and its call through node.cpp and through torch."""

    def __init__(
        self,
        node: ModuleType,
        *,
        kind: int = programs.RESIDENT_KIND,
        weight: bool = True,
        bias: bool = True,
        centered: bool = True,
        x_dtype: torch.dtype = torch.float32,
        y_dtype: torch.dtype | None = None,
    ) -> None:
        affine = weight or bias
        self.configuration = HostConfiguration(
            device=-1,
            shape=SHAPE,
            row_length=LENGTH,
            x_dtype=x_dtype,
            y_dtype=y_dtype or x_dtype,
            affine_dtype=torch.float32 if affine else None,
            has_weight=weight,
            has_bias=bias,
            centered=centered,
            kind=kind,
        )
        self.weight = torch.randn(SHAPE).requires_grad_() if weight else None
        self.bias = torch.randn(SHAPE).requires_grad_() if bias else None
        self.call = autograd.node_call(node, self.configuration)
        self.normalise: Callable[..., Tensor] = node.normalise

    def __call__(self, x: Tensor) -> Tensor:
        return self.normalise(self.call, x, self.weight, self.bias, 1e-5)

    def reference(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.double()
        bias = None if self.bias is None else self.bias.double()
        if self.configuration.centered:
            return F.layer_norm(x.double(), SHAPE, weight, bias, 1e-5)
        return F.rms_norm(x.double(), SHAPE, weight, 1e-5)

    def leaves(self, x: Tensor) -> list[Tensor]:
        return [t for t in (x, self.weight, self.bias) if t is not None and t.requires_grad]


def _gradients(y: Tensor, dy: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y, leaves, dy.to(y.dtype)))


def _assert_close(ours: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(ours.double(), reference.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 128, 129, 300])
@pytest.mark.parametrize("kind", [programs.RESIDENT_KIND, programs.LONG_KIND])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
def test_values_and_gradients_are_those_of_the_formula(
    node: ModuleType, rows: int, kind: int, centered: bool, weight: bool, bias: bool
) -> None:
    layer = Layer(node, kind=kind, centered=centered, weight=weight, bias=bias and centered)
    x = torch.randn(rows, *SHAPE).requires_grad_()
    y, expected = layer(x), layer.reference(x)
    assert y.shape == x.shape
    assert y.requires_grad
    _assert_close(y, expected)
    dy = torch.randn_like(x)
    leaves = layer.leaves(x)
    for ours, reference in zip(
        _gradients(y, dy, leaves), _gradients(expected, dy, leaves), strict=True
    ):
        _assert_close(ours, reference)


@pytest.mark.parametrize("rows", [5, 200])
@pytest.mark.parametrize("needed", range(1, 8))
@pytest.mark.parametrize("kind", [programs.RESIDENT_KIND, programs.LONG_KIND])
def test_only_the_gradients_that_are_needed_are_computed(
    node: ModuleType, rows: int, needed: int, kind: int
) -> None:
    layer = Layer(node, kind=kind)
    x = torch.randn(rows, *SHAPE)
    assert layer.weight is not None
    assert layer.bias is not None
    for bit, tensor in enumerate((x, layer.weight, layer.bias)):
        tensor.requires_grad_(bool(needed >> bit & 1))
    leaves = layer.leaves(x)
    y, expected = layer(x), layer.reference(x)
    dy = torch.randn_like(x)
    ours = _gradients(y, dy, leaves)
    for one, reference in zip(ours, _gradients(expected, dy, leaves), strict=True):
        _assert_close(one, reference)
    assert layer.configuration.made[-1][2:] == tuple(bool(needed >> bit & 1) for bit in range(3))


@pytest.mark.parametrize("centered", [True, False])
def test_gradients_that_keep_their_graph_are_right_where_one_norm_is_applied_twice(
    node: ModuleType, centered: bool
) -> None:
    layer = Layer(node, centered=centered, bias=centered)
    x = torch.randn(5, *SHAPE).requires_grad_()
    leaves = layer.leaves(x)

    def gradients(norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        once = torch.autograd.grad(norm(norm(x) * 1.7).pow(3).sum(), leaves, create_graph=True)
        penalty = sum(gradient.double().square().sum() for gradient in once)
        twice = torch.autograd.grad(penalty, leaves, allow_unused=True)  # type: ignore[arg-type]
        return (*once, *(t for t in twice if t is not None))

    for ours, reference in zip(gradients(layer), gradients(layer.reference), strict=True):
        torch.testing.assert_close(ours.double(), reference.double(), rtol=1e-4, atol=1e-3)


def test_a_leaf_left_out_of_the_backward_pass_is_not_computed(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    (dx,) = _gradients(layer(x), torch.ones_like(x), [x])
    assert dx.shape == x.shape
    assert layer.configuration.made[-1][2:] == (True, False, False)


def test_without_gradients_nothing_is_saved_or_recorded(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE)
    with torch.no_grad():
        y = layer(x)
    assert y.grad_fn is None
    with torch.inference_mode():
        assert layer(x).is_inference()
    _assert_close(y, layer.reference(x))


@pytest.mark.parametrize("y_dtype", [torch.bfloat16, torch.float32])
def test_half_precision_comes_back_in_the_type_that_was_asked_for(
    node: ModuleType, y_dtype: torch.dtype
) -> None:
    layer = Layer(node, x_dtype=torch.bfloat16, y_dtype=y_dtype)
    x = torch.randn(9, *SHAPE).bfloat16().requires_grad_()
    y = layer(x)
    assert y.dtype == y_dtype
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert layer.weight is not None
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_bias_alone_has_a_gradient_of_its_shape(node: ModuleType) -> None:
    layer = Layer(node, weight=False)
    x = torch.randn(9, *SHAPE)
    layer(x).sum().backward()
    assert layer.bias is not None
    torch.testing.assert_close(layer.bias.grad, torch.full(SHAPE, 9.0))


def test_programs_are_made_once_for_each_need(node: ModuleType) -> None:
    layer = Layer(node)
    for _ in range(3):
        for rows in (4, 200):
            layer(torch.randn(rows, *SHAPE).requires_grad_()).sum().backward()
    assert len(layer.configuration.made) == 4, "few rows and many, forward and backward"


def test_addresses_that_are_not_multiples_of_16_take_another_program(node: ModuleType) -> None:
    layer = Layer(node)
    memory = torch.randn(5 * LENGTH + 1)
    x = memory[1:].view(5, *SHAPE)
    _assert_close(layer(x), layer.reference(x))
    layer(memory[:-1].view(5, *SHAPE))
    assert layer.configuration.made == [(False, True), (True, True)]


def test_gradients_of_gradients_are_torch_s(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    weights = torch.randn(5, *SHAPE)

    def second(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad((y * weights).sum(), layer.leaves(x), create_graph=True)
        total = sum((g.double().square().sum() for g in first), torch.zeros(()).double())
        return list(torch.autograd.grad(total, [x, layer.weight]))  # type: ignore[list-item]

    for ours, reference in zip(second(layer(x)), second(layer.reference(x)), strict=True):
        torch.testing.assert_close(ours.double(), reference.double(), rtol=1e-3, atol=1e-4)


def test_a_batch_of_gradients_is_torch_s(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    y = layer(x)
    dys = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, [x], dys, is_grads_batched=True, retain_graph=True)
    for one, dy in zip(batched, dys, strict=True):
        (alone,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        _assert_close(one, alone)


@pytest.mark.parametrize("which", ["expanded", "transposed", "negative"])
def test_a_gradient_of_any_layout_is_read_rightly(node: ModuleType, which: str) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    dy = {
        "expanded": torch.randn(1, 2, 1).expand(5, *SHAPE),
        "transposed": torch.randn(4, 2, 5).transpose(0, 2),
        "negative": torch.randn(5, *SHAPE, dtype=torch.complex64).conj().imag,
    }[which]
    y, expected = layer(x), layer.reference(x)
    leaves = layer.leaves(x)
    for ours, reference in zip(
        _gradients(y, dy, leaves), _gradients(expected, dy, leaves), strict=True
    ):
        _assert_close(ours, reference)


def test_what_was_saved_and_then_changed_is_refused(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    source = x * 1
    y = layer(source)
    source.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_backward_needs_retain_graph(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    y = layer(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_saved_tensor_hooks_see_x_weight_and_statistics(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    shapes = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert sorted(shapes) == sorted([(5, *SHAPE), SHAPE, (2, 5)])
    expected = layer.reference(x)
    dy = torch.randn_like(x)
    _assert_close(_gradients(y, dy, [x])[0], _gradients(expected, dy, [x])[0])


def test_saved_tensors_may_come_back_with_other_strides(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()

    def other_strides(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, other_strides):
        y, expected = layer(x), layer.reference(x)
    dy, leaves = torch.randn_like(x), layer.leaves(x)
    for ours, reference in zip(
        _gradients(y, dy, leaves), _gradients(expected, dy, leaves), strict=True
    ):
        _assert_close(ours, reference)


@pytest.mark.parametrize("change", [Tensor.double, lambda tensor: tensor[:1]])
def test_saved_tensors_that_come_back_as_others_meet_torch_not_a_kernel(
    node: ModuleType, change: Callable[[Tensor], Tensor]
) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, change):
        y = layer(x)
    layer.configuration.calls.clear()
    with contextlib.suppress(RuntimeError):  # in torch's words, where shapes do not fit
        _gradients(y, torch.ones_like(x), [x])
    assert layer.configuration.calls == []


def test_threads_that_need_a_program_at_once_launch_one_that_is_kept(node: ModuleType) -> None:
    layer, x = Layer(node), torch.randn(5, *SHAPE)
    started = threading.Barrier(4)
    made: list[object] = []
    make = layer.configuration._make

    def slow(*flags: bool) -> None:
        time.sleep(0.05)  # as compiling does, it lets the others run
        made.append(flags)
        make(*flags)

    layer.configuration._make = slow  # type: ignore[method-assign]

    def work() -> None:
        started.wait()
        _assert_close(layer(x), layer.reference(x))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) > 1, "they did not meet"
    gc.collect()
    _assert_close(layer(x), layer.reference(x))


def test_the_graph_and_its_tensors_are_freed_with_the_output(node: ModuleType) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    source = x * 1
    alive = weakref.ref(source)
    y = layer(source)
    del source
    assert alive() is not None, "backward needs it"
    del y
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_error_in_making_a_program_reaches_the_caller_and_passes(
    node: ModuleType, when: str
) -> None:
    layer = Layer(node)
    x = torch.randn(5, *SHAPE).requires_grad_()
    y = layer(x) if when == "backward" else None
    layer.configuration.refuse = MemoryError("no room for this binary")
    with pytest.raises(MemoryError, match="no room for this binary"):
        layer(x) if y is None else y.sum().backward(retain_graph=True)
    layer.configuration.refuse = None
    (layer(x) if y is None else y).sum().backward()
    assert x.grad is not None


def test_arguments_of_the_wrong_kind_are_a_type_error(node: ModuleType) -> None:
    layer = Layer(node)
    with pytest.raises(TypeError, match="expected a tensor, got NoneType"):
        node.normalise(layer.call, None, None, None, 1e-5)
    with pytest.raises(TypeError, match="expected a tensor or None, got str"):
        node.normalise(layer.call, torch.ones(5, *SHAPE), "weight", None, 1e-5)
    with pytest.raises(TypeError, match="5 arguments"):
        node.normalise(layer.call)
    with pytest.raises(ValueError, match="PyCapsule"):
        node.normalise(layer, torch.ones(5, *SHAPE), None, None, 1e-5)
    with pytest.raises(TypeError, match="real number"):
        node.normalise(layer.call, torch.ones(5, *SHAPE), None, None, "1e-5")


def test_threads_do_not_disturb_each_other(node: ModuleType) -> None:
    layer = Layer(node)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(30):
                x = torch.randn(5, *SHAPE, generator=generator).requires_grad_()
                dy = torch.randn(5, *SHAPE, generator=generator)
                (ours,) = _gradients(layer(x), dy, [x])
                _assert_close(ours, _gradients(layer.reference(x), dy, [x])[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _with(layer: Layer, **changed: Tensor) -> Layer:
    for name, tensor in changed.items():
        setattr(layer, name, tensor)
    return layer


@pytest.mark.parametrize(
    "what", ["short rows", "no rows", "weight's shape", "bias's strides", "nested", "too few"]
)
@pytest.mark.parametrize("through", ["node.cpp", "Python"])
def test_tensors_that_do_not_fit_are_torch_s(node: ModuleType, what: str, through: str) -> None:
    layer, x = Layer(node), torch.randn(5, *SHAPE)
    if what == "short rows":
        x = torch.randn(5, 2, 3)
    elif what == "no rows":
        x = torch.randn(0, *SHAPE)
    elif what == "too few":
        x = torch.randn(4)
    elif what == "weight's shape":
        _with(layer, weight=torch.randn(8))
    elif what == "bias's strides":
        _with(layer, bias=torch.randn(4, 2).t())
    else:
        x = torch.nested.nested_tensor([x, x[:2]])
    if through == "Python":
        assert autograd.run(layer.configuration, x, layer.weight, layer.bias, 1e-5) is None
    else:
        assert layer(x) is None
    assert layer.configuration.calls == []


@pytest.mark.parametrize("which", ["transposed", "expanded", "negative"])
def test_an_input_of_any_layout_is_read_rightly(node: ModuleType, which: str) -> None:
    layer = Layer(node)
    x = {
        "expanded": torch.randn(1, 2, 1).expand(5, *SHAPE),
        "transposed": torch.randn(4, 2, 5).transpose(0, 2),
        "negative": torch.randn(5, *SHAPE, dtype=torch.complex64).conj().imag,
    }[which]
    x = x.detach().requires_grad_()
    y, expected = layer(x), layer.reference(x)
    _assert_close(y, expected)
    dy = torch.randn(5, *SHAPE)
    _assert_close(_gradients(y, dy, [x])[0], _gradients(expected, dy, [x])[0])
