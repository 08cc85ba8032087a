"""The models: published sizes, thin ones that learn, and replays whose gradients are exact."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from netbottleneck.bench import models
from netbottleneck.bench.models import passes
from netbottleneck.bench.models.passes import IdleOptimizer, ReplayModel, gradient_bytes, replay

SIZES = {
    "resnet18": (11_689_512, 62),
    "resnet34": (21_797_672, 110),
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "resnet152": (60_192_808, 467),
    "vgg16": (138_357_544, 32),
    "vgg16_bn": (138_365_992, 58),
    "bert_base": (110_106_428, 206),
    "bert_large": (336_226_108, 398),
    "thin_resnet": (308_074, 29),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_the_published_parameters_and_tensors(name: str) -> None:
    shapes = models.shapes(name)
    assert (sum(math.prod(shape) for _, shape in shapes), len(shapes)) == SIZES[name]


@pytest.mark.parametrize(
    ("name", "first", "other", "last"),
    [
        ("resnet50", "conv1.weight", "layer4.0.downsample.1.bias", "fc.bias"),
        ("vgg16_bn", "features.0.weight", "features.41.bias", "classifier.6.bias"),
        (
            "bert_base",
            "bert.embeddings.word_embeddings.weight",
            "bert.encoder.layer.11.attention.output.LayerNorm.weight",
            "cls.seq_relationship.bias",
        ),
    ],
)
def test_parameters_have_their_usual_names(name: str, first: str, other: str, last: str) -> None:
    names = [parameter for parameter, _ in models.shapes(name)]
    assert names[0] == first
    assert other in names
    assert names[-1] == last


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, netbottleneck.bench.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"'resnet51'.*resnet50"):
        models.build("resnet51")


@pytest.mark.parametrize(
    ("name", "options", "sample", "shape"),
    [
        ("resnet50", {"width": 0.0625, "classes": 7}, (2, 3, 32, 32), (2, 7)),
        ("thin_resnet", {}, (2, 1, 8, 8), (2, 10)),
        ("vgg16", {"width": 0.0625}, (2, 3, 32, 32), (2, 1000)),
        ("vgg16_bn", {"width": 0.0625, "channels": 1}, (2, 1, 32, 32), (2, 1000)),
    ],
)
def test_a_thin_model_scores_images_and_reaches_all_parameters(
    name: str, options: dict[str, Any], sample: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    model = models.build(name, **options)
    scores = model(torch.ones(sample))
    assert scores.shape == shape
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_thin_bert_scores_words_and_reaches_all_parameters() -> None:
    model = models.build("thin_bert")
    tokens, order = model(torch.arange(32).view(2, 16))
    assert (tokens.shape, order.shape) == ((2, 16, 256), (2, 2))
    (tokens.sum() + order.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["thin_resnet", "thin_bert"])
def test_a_random_batch_is_an_input_of_its_model(name: str) -> None:
    torch.manual_seed(7)
    batch = passes.random_batch(name, 40)
    assert batch.shape == (40, *models.sample_shape(name)[1:])
    models.build(name)(batch)


@pytest.fixture(name="digits")
def fixture_digits() -> models.Digits:
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn, whose wheel holds the digits, is not installed")
    return models.digits()


def test_digits_are_split_by_seed_and_no_image_is_lost(digits: models.Digits) -> None:
    assert digits.train_images.shape == (1438, 1, 8, 8)
    assert digits.test_images.shape == (359, 1, 8, 8)
    assert (digits.train_images.min(), digits.train_images.max()) == (0, 1)
    again, other = models.digits(), models.digits(seed=1)
    assert (again.test_images == digits.test_images).all()
    assert not (other.test_images == digits.test_images).all()
    assert digits.train_labels.sum() + digits.test_labels.sum() == other.train_labels.sum() + other.test_labels.sum()
    assert sorted(set(digits.test_labels.tolist())) == list(range(10))


def test_without_scikit_learn_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="scikit-learn"):
        models.digits()


@pytest.fixture(name="one_thread")
def fixture_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_thin_resnet_learns_the_digits(digits: models.Digits) -> None:
    torch.manual_seed(0)
    model = models.build("thin_resnet")
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for batch in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        found = model(torch.from_numpy(digits.test_images)).argmax(1)
    assert (found == torch.from_numpy(digits.test_labels)).float().mean() >= 0.95


LAYERS = [
    passes.LayerShapes("a", (("a.weight", (3, 5)), ("a.bias", (3,))), 2),
    passes.LayerShapes("b.0", (("b.0.weight", (7,)),), 6),
    passes.LayerShapes("c", (("c.weight", (2, 2, 2)), ("c.bias", ())), 0),
]


def is_filled(model: ReplayModel, times: int = 1) -> bool:
    """True if every gradient is `times` times its value."""
    held = [parameter.grad for parameter in model.in_order()]
    values = [times * model.gradient_value(index) for index in range(len(held))]
    return all(grad is not None and bool((grad == value).all()) for grad, value in zip(held, values, strict=True))


@pytest.mark.parametrize("name", ["resnet50", "vgg16_bn", "bert_base"])
def test_layers_hold_every_parameter_once_and_some_arithmetic(name: str) -> None:
    layers = passes.layers_of(name)
    held = [parameter for layer in layers for parameter in layer.parameters]
    assert sorted(held) == sorted(models.shapes(name))
    assert sum(layer.operations for layer in layers) > 10**9


def test_resnet50_does_its_known_four_billion_multiply_adds() -> None:
    convolutions = [layer for layer in passes.layers_of("resnet50") if len(layer.parameters[0][1]) > 1]
    assert sum(layer.operations for layer in convolutions) == 4_089_184_256


def test_a_replay_has_the_models_names_shapes_and_bytes() -> None:
    model = replay("resnet50")
    assert [(name, tuple(value.shape)) for name, value in model.named_parameters()] == models.shapes("resnet50")
    assert gradient_bytes(model) == 102_228_128


@pytest.mark.parametrize("mode", ["sleep", "spin"])
def test_a_step_lasts_at_least_the_requested_time(mode: str) -> None:
    model = ReplayModel(LAYERS, (30, 60), mode=mode)
    start = time.perf_counter()
    loss = model()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    assert middle - start >= 0.030
    assert end - middle >= 0.060
    assert is_filled(model)


def test_gradients_are_ready_in_reverse_order_at_their_layers_time() -> None:
    model = ReplayModel(LAYERS, (0, 80))
    seen: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append((name, time.perf_counter())))
    start = time.perf_counter()
    model().backward()
    assert [name.split(".")[0] for name, _ in seen] == ["c", "c", "b", "a", "a"]
    since = {name: moment - start for name, moment in seen}
    assert since["b.0.weight"] >= 0.060
    assert since["a.weight"] >= 0.080


@pytest.mark.parametrize("reuse", [True, False])
def test_each_pass_has_its_own_values_regardless_of_the_previous_one(reuse: bool) -> None:
    model = ReplayModel(LAYERS, (0, 0), reuse=reuse)
    for _ in range(3):
        model().backward()
        assert is_filled(model)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1000)  # as an all-reduce in place would
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("reuse", [True, False])
def test_passes_accumulate_if_gradients_are_kept(reuse: bool) -> None:
    model = ReplayModel(LAYERS, (0, 0), reuse=reuse)
    expected = [0] * 5
    for _ in range(3):
        model().backward()
        expected = [so_far + model.gradient_value(index) for index, so_far in enumerate(expected)]
    for parameter, value in zip(model.in_order(), expected, strict=True):
        assert parameter.grad is not None
        assert bool((parameter.grad == value).all())


def test_reused_gradients_are_neither_copied_nor_allocated_again() -> None:
    model = ReplayModel(LAYERS, (0, 0), reuse=True)
    places = []
    for _ in range(2):
        model().backward()
        places.append([parameter.grad.data_ptr() for parameter in model.in_order() if parameter.grad is not None])
        model.zero_grad(set_to_none=True)
    assert len(places[0]) == 5
    assert places[0] == places[1]


def test_a_parameter_without_gradient_is_left_out() -> None:
    model = ReplayModel(LAYERS, (0, 0))
    next(iter(model.parameters())).requires_grad_(False)
    model().backward()
    assert [parameter.grad is None for parameter in model.in_order()] == [True, False, False, False, False]


def test_ranks_differ_by_seed_and_each_knows_the_others_values() -> None:
    first, second = ReplayModel(LAYERS, (0, 0), seed=0), ReplayModel(LAYERS, (0, 0), seed=1)
    first().backward()
    assert [second.gradient_value(index, seed=0, passes=1) for index in range(5)] == [
        int(parameter.grad.flatten()[0]) for parameter in first.in_order() if parameter.grad is not None
    ]
    assert first.gradient_value(0) != first.gradient_value(0, seed=1)


def test_an_idle_optimizer_is_an_optimizer_that_changes_nothing() -> None:
    model = ReplayModel(LAYERS, (0, 0))
    optimizer = IdleOptimizer(model.parameters())
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    model().backward()
    optimizer.step()
    assert steps == [1]
    assert not any(parameter.any() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ReplayModel(LAYERS, (1, 1), mode="wait"), "'wait'"),
        (lambda: ReplayModel(LAYERS, (-1, 1)), "-1"),
        (lambda: ReplayModel([], (1, 1)), "0 layers"),
        (lambda: replay("vgg16_bn"), "forward_ms"),
        (lambda: models.build("thin_bert", hidden=10, heads=4), "10"),
    ],
)
def test_bad_arguments_are_refused_with_the_value(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_replay_runs_under_no_grad_and_in_a_wrapper() -> None:
    model = nn.Sequential(ReplayModel(LAYERS, (0, 0)))
    with torch.no_grad():
        assert not model(torch.ones(2)).requires_grad
    assert model(torch.ones(2)).requires_grad
