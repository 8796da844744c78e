"""`contiguous_param`: the same parameters, in one buffer for each dtype and device."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hfai.nn import to_hfai, to_torch
from tests.nn.sharding import ignore_fsdp_warnings, shard_fsdp1, shard_fsdp2


def _model(device: torch.device | str = "cpu") -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
        nn.Flatten(),
        nn.Linear(20, 7),
        nn.LayerNorm(7),
    )
    return model.to(device)


def _images(device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(6, 3, 4, 4, device=device)


def _storages(model: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


def test_by_default_no_parameter_is_moved() -> None:
    model = _model()
    before = [p.data_ptr() for p in model.parameters()]
    to_torch(to_hfai(model))
    assert [p.data_ptr() for p in model.parameters()] == before


def test_the_parameters_lie_side_by_side_in_one_buffer(device: torch.device) -> None:
    model = to_hfai(_model(device), contiguous_param=True)
    assert len(_storages(model)) == 1
    end = 0
    for parameter in model.parameters():
        start = parameter.storage_offset() * parameter.element_size()
        assert start % 256 == 0
        assert end <= start < end + 256
        end = start + parameter.numel() * parameter.element_size()
    storage = next(model.parameters()).untyped_storage()
    assert end <= storage.nbytes() < end + 256


def test_objects_values_strides_and_gradients_stay(device: torch.device) -> None:
    model = _model(device)
    model(_images(device)).square().sum().backward()
    before = [(n, p, p.detach().clone(), p.stride(), p.grad) for n, p in model.named_parameters()]
    to_hfai(model, contiguous_param=True)
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        assert (name, parameter.stride()) == (old[0], old[3])
        assert parameter is old[1]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert torch.equal(parameter, old[2])
        assert parameter.grad is old[4]


def test_each_dtype_gets_a_buffer() -> None:
    model = _model()
    model[2].bfloat16()
    to_hfai(model, contiguous_param=True)
    by_dtype = {
        dtype: {p.untyped_storage().data_ptr() for p in model.parameters() if p.dtype == dtype}
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert [len(storages) for storages in by_dtype.values()] == [1, 1]
    assert len(_storages(model)) == 2


def test_training_goes_on_as_without_it(device: torch.device) -> None:
    torch.manual_seed(0)
    models = [_model(device)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in models]
    for step in range(4):
        if step == 2:
            to_hfai(models[1], contiguous_param=True)
        images = _images(device)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(_storages(models[1])) == 1


def test_asking_twice_moves_nothing_again() -> None:
    model = to_hfai(_model(), contiguous_param=True)
    before = [p.data_ptr() for p in model.parameters()]
    to_hfai(model, contiguous_param=True)
    to_hfai(model)
    assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.parametrize(
    "scatter",
    [
        copy.deepcopy,
        lambda model: model.double(),
        lambda model: (model.load_state_dict(_model().state_dict(), assign=True), model)[1],
        lambda model: (model.register_parameter("late", nn.Parameter(torch.ones(3))), model)[1],
    ],
    ids=["deepcopy", "dtype", "assign", "new parameter"],
)
def test_a_model_that_came_apart_is_put_together_again(
    scatter: Callable[[nn.Module], nn.Module],
) -> None:
    model = scatter(to_hfai(_model(), contiguous_param=True))
    assert len(_storages(model)) > 1
    to_hfai(model, contiguous_param=True)
    assert len(_storages(model)) == 1


def test_a_saved_model_stays_in_one_buffer() -> None:
    file = io.BytesIO()
    torch.save(to_hfai(_model(), contiguous_param=True), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    assert len(_storages(model)) == 1
    to_torch(model)
    assert len(_storages(model)) == 6


def test_to_torch_gives_every_parameter_storage_of_its_own(device: torch.device) -> None:
    model = _model(device)
    before = {name: (p, p.detach().clone(), p.stride()) for name, p in model.named_parameters()}
    to_torch(to_hfai(model, contiguous_param=True))
    assert len(_storages(model)) == len(before)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.stride() == before[name][2]
        assert parameter.storage_offset() == 0
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    assert not any("hfai" in key for module in model.modules() for key in vars(module))


def test_to_torch_leaves_storage_alone_that_others_packed() -> None:
    model = nn.LSTM(3, 3)
    buffer = torch.randn(sum(p.numel() for p in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.data = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    to_torch(to_hfai(model))
    assert _storages(model) == {buffer.untyped_storage().data_ptr()}


def test_parameters_that_others_packed_side_by_side_are_moved() -> None:
    # cuDNN keeps all weights of an LSTM in one storage: near each other is not shared.
    model = nn.Linear(3, 3)
    buffer = torch.randn(12)
    model.weight.data, model.bias.data = buffer[:9].view(3, 3), buffer[9:]
    to_hfai(model, contiguous_param=True)
    assert torch.equal(model.weight.flatten(), buffer[:9])
    assert torch.equal(model.bias, buffer[9:])
    assert model.weight.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()


def test_the_state_dict_loads_into_a_plain_model() -> None:
    model = to_hfai(_model(), contiguous_param=True)
    plain = _model()
    plain.load_state_dict(model.state_dict(), strict=True)
    images = _images()
    torch.testing.assert_close(plain(images), model(images))
    model.load_state_dict(_model().state_dict(), strict=True)
    assert len(_storages(model)) == 1


def test_inplace_false_packs_the_copy_alone() -> None:
    model = _model()
    before = [p.data_ptr() for p in model.parameters()]
    packed = to_hfai(model, contiguous_param=True, inplace=False)
    assert [p.data_ptr() for p in model.parameters()] == before
    assert len(_storages(packed)) == 1


def test_frozen_empty_and_scalar_parameters_are_packed_too() -> None:
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(2.0))
    model.empty = nn.Parameter(torch.empty(0, 4))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    to_hfai(model, contiguous_param=True)
    assert model.scalar.untyped_storage().data_ptr() == model.frozen.untyped_storage().data_ptr()
    assert model.scalar.item() == 2
    assert model.empty.shape == (0, 4)
    assert not model.frozen.requires_grad
    to_torch(model)
    assert model.scalar.untyped_storage().nbytes() == 4


def test_a_model_without_parameters_is_fine() -> None:
    model = nn.ReLU()
    assert to_torch(to_hfai(model, contiguous_param=True)) is model


def test_an_expanded_parameter_becomes_dense() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1).expand(5))
    to_hfai(model, contiguous_param=True)
    assert model.weight.stride() == (1,)
    assert torch.equal(model.weight, torch.ones(5))


def _tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "output": nn.Linear(3, 5)})
    model["output"].weight = model["embedding"].weight
    return model


def _same_module_twice() -> nn.Module:
    layer = nn.LayerNorm(3, bias=False)
    return nn.ModuleDict({"first": layer, "second": layer})


def _overlapping_views() -> nn.Module:
    model = nn.Module()
    model.whole = nn.Parameter(torch.ones(8))
    model.part = nn.Parameter(model.whole.data[2:4])
    return model


def _parameter_in_buffer() -> nn.Module:
    model = nn.Module()
    model.register_buffer("whole", torch.ones(8))
    model.part = nn.Parameter(model.whole[2:4])
    return model


def _buffer_on_parameter() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(8))
    model.register_buffer("view", model.weight.data[7:])
    return model


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (_tied, ("embedding.weight", "output.weight")),
        (_same_module_twice, ("first.weight", "second.weight")),
        (_overlapping_views, ("whole", "part")),
        (_buffer_on_parameter, ("weight", "view")),
        (_parameter_in_buffer, ("part", "whole")),
    ],
)
def test_shared_memory_is_refused_by_name_before_anything_changes(
    build: Callable[[], nn.Module], names: tuple[str, str]
) -> None:
    model = build()
    classes = [type(module) for module in model.modules()]
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"not shared.*contiguous_param=False") as error:
        to_hfai(model, contiguous_param=True)
    assert all(repr(name) in str(error.value) for name in names)
    assert [type(module) for module in model.modules()] == classes
    assert [p.data_ptr() for p in model.parameters()] == before


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))


def _sparse() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    return model


def _subclass() -> nn.Module:
    model = nn.Module()
    kind = type("Quantized", (Tensor,), {})
    model.weight = nn.Parameter(torch.ones(3).as_subclass(kind))
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_lazy, "'1.weight' has none yet: materialise the model first"),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' has none yet: materialise"),
        (_sparse, "'weight' is a Tensor with layout torch.sparse_coo"),
        (_subclass, "'weight' is a Quantized"),
    ],
)
def test_what_cannot_be_moved_is_refused_in_words(
    build: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        to_hfai(build(), contiguous_param=True)


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local


@ignore_fsdp_warnings
@pytest.mark.parametrize("shard", [shard_fsdp1, shard_fsdp2])
def test_a_sharded_model_is_refused_and_a_packed_one_can_be_sharded(
    shard: Callable[[nn.Module], nn.Module], one_process_group: None
) -> None:
    inputs = torch.randn(4, 5)
    expected = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    packed = to_hfai(copy.deepcopy(expected), contiguous_param=True)
    sharded = shard(packed)
    with pytest.raises(ValueError, match=r"sharded .*: call to_hfai before FSDP"):
        to_hfai(sharded, contiguous_param=True)
    before = [_local(p).data_ptr() for p in sharded.parameters()]
    to_torch(sharded)
    assert [_local(p).data_ptr() for p in sharded.parameters()] == before
    for model in (expected, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(sharded(inputs), expected(inputs))
