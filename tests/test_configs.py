"""Configs of models: stored exactly, and rebuilt by the class that the model names."""

import enum
import json
import logging
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state, save_model
from storesvc_client.errors import StructureError
from storesvc_client.trees.nnx.recipes import Recipe, factory_text
from storesvc_client.trees.structure.settings import (
    encode_settings,
    plain_settings,
    rebuild_settings,
    setting_classes,
)

_NAMES: Final[dict[int, str]] = {}


class dtype:  # noqa: N801 - torch's own name
    """A value without attributes, that differs from others in its repr alone."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.{_NAMES[id(self)]}"


dtype.__module__ = "torch"


def torch_dtype(name: str) -> dtype:
    """Returns a dtype of torch."""
    made = dtype()
    _NAMES[id(made)] = name
    _KEPT.append(made)  # its id stays its own
    return made


_KEPT: Final[list[dtype]] = []
FLOAT32: Final = torch_dtype("float32")
BFLOAT16: Final = torch_dtype("bfloat16")


GOLDEN = Path(__file__).parent / "golden/configs/settings.json"


class Kind(enum.StrEnum):
    FAST = "fast"
    EXACT = "exact"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Quantization:
    bits: int = 8
    pattern: str = ".*"


class Sizes(dict[str, int]):
    """A subclass of dict."""


class Vision:
    """A config whose ``to_dict`` loses its level, as many do."""

    def __init__(self, depth: int = 2, level: Level = Level.LOW) -> None:
        self.depth, self.level = depth, level

    def to_dict(self) -> dict[str, Any]:
        return {"depth": self.depth}


class Config:
    sub_configs: ClassVar = {"vision_config": Vision}
    made = 0

    def __init__(
        self,
        width: int = 4,
        kind: Kind | str = Kind.FAST,
        vision_config: Vision | None = None,
        quantization: "Quantization | None" = None,
        sizes: Sizes | None = None,
        **more: Any,
    ) -> None:
        type(self).made += 1
        self.width, self.kind = width, kind
        self.vision_config = vision_config or Vision()
        self.quantization, self.sizes = quantization, sizes
        for name, value in more.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return {"width": self.width}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Config":
        return cls(**fields)


class Derived(Config):
    """A subclass of the config that a model names."""


class Model(nnx.Module):
    config_class = Config

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.linear = nnx.Linear(2, config.width, rngs=rngs)


C = TypeVar("C", bound=Config)


class Annotated(nnx.Module, Generic[C]):
    """A model that names its config in the annotation only."""

    def __init__(self, config: "C", *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.linear = nnx.Linear(2, config.width, rngs=rngs)


@dataclass
class Foreign:
    width: int = 4


@pytest.fixture
def run() -> Any:
    with store.connect("memory://") as client:
        yield client.run("tests/configs")


def full() -> Config:
    return Config(
        width=5,
        kind=Kind.EXACT,
        vision_config=Vision(3, Level.HIGH),
        quantization=Quantization(4),
        sizes=Sizes(a=1),
        axes=("dp", ("tp", None)),
        dtype=jnp.bfloat16,
        numpy_dtype=np.dtype("float32"),
        rates=[np.float32(0.5), float("inf")],
        table=np.arange(6, dtype=np.int16).reshape(2, 3),
        ordered=OrderedDict(b=1, a={2: "x"}),
        nothing=None,
    )


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tolist() == other.tolist())
    if isinstance(one, (Config, Vision)):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_config_is_restored_exactly_and_no_constructor_runs(run: store.Run) -> None:
    config = full()
    save_model(run, 1, Model(config, rngs=nnx.Rngs(0))).result()
    made = Config.made

    back = restore_model(run, model=Model)

    assert same(config, back.config)
    assert made == Config.made


def test_a_config_is_stored_as_it_always_was() -> None:
    document = json.loads(json.dumps(encode_settings(full())))

    assert json.loads(GOLDEN.read_text()) == document
    assert same(full(), rebuild_settings(document, setting_classes(Config)))


DTYPES: dict[str, tuple[Any, Any]] = {
    "torch": (FLOAT32, "float32"),
    "torch, bfloat16": (BFLOAT16, "bfloat16"),
    "text": ("float32", "float32"),
    "jax": (jnp.float32, jnp.float32),
    "class of numpy": (np.float32, np.float32),
    "numpy": (np.dtype("float16"), np.dtype("float16")),
    "ml_dtypes": (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "numpy, of ml_dtypes": (np.dtype("float8_e4m3fn"), np.dtype("float8_e4m3fn")),
}
"""Dtypes of other libraries in a config, and what is restored."""


@pytest.mark.parametrize("library", DTYPES)
def test_a_dtype_of_any_library_in_a_config_is_restored_with_the_class_and_a_factory(
    run: store.Run, library: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtype, expected = DTYPES[library]
    config = Config(dtype=dtype, vision_config=Vision(level=dtype), more=[{"x": dtype}])
    save_model(run, 1, Model(config, rngs=nnx.Rngs(0)), rehearse="strict").result()

    back = restore_model(run, model=Model).config
    restore_model(run, model=lambda: Model(config, rngs=nnx.Rngs(0)))
    restore_model(run, model=lambda: Model(back, rngs=nnx.Rngs(0)))

    assert "another model" not in caplog.text
    assert [expected] * 3 == [back.dtype, back.vision_config.level, back.more[0]["x"]]
    assert type(expected) is type(back.dtype)


@pytest.mark.parametrize("model", [Model, Annotated])
def test_a_config_may_be_of_a_class_that_derives_from_the_named_one(
    run: store.Run, model: Any
) -> None:
    save_model(run, 1, model(Derived(3), rngs=nnx.Rngs(0))).result()

    assert Derived is type(restore_model(run, model=model).config)


def test_arrays_of_jax_in_a_config_are_restored_as_values(run: store.Run) -> None:
    config = Config(scales=[jnp.float32(0.25), jnp.arange(3)])
    save_model(run, 1, Model(config, rngs=nnx.Rngs(0))).result()

    scales = restore_model(run, model=Model).config.scales

    assert [0.25, [0, 1, 2]] == [scale.tolist() for scale in scales]


def test_a_mesh_in_a_config_is_not_kept(run: store.Run) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    model = Model(Config(_held_mesh=mesh), rngs=nnx.Rngs(0))
    save_model(run, 1, model).result()

    assert not hasattr(restore_model(run, model=Model).config, "_held_mesh")


def test_a_config_that_the_model_does_not_name_is_rejected_with_the_call(
    run: store.Run,
) -> None:
    class Other(nnx.Module):
        def __init__(self, config: Foreign, *, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(2, config.width, rngs=rngs)

    save_model(run, 1, Model(Config(), rngs=nnx.Rngs(0)), rehearse="off").result()

    with pytest.raises(store.MismatchError) as e:
        restore_model(run, model=Other)

    assert (
        "of class tests.test_configs:Foreign, got one of class tests.test_configs:"
        in (str(e.value))
    )
    assert "model=lambda: Other(config=config, rngs=nnx.Rngs(0))" in str(e.value)


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "builtins:dict", "tests.test_configs:C"]
)
def test_a_document_cannot_name_other_classes_than_the_config_does(name: str) -> None:
    with pytest.raises(StructureError, match="expected a class that the model's"):
        rebuild_settings({"object": name, "fields": []}, setting_classes(Config))


@pytest.mark.parametrize(
    "document",
    [
        {"object": "tests.test_configs:Config", "fields": [[1, 2]]},
        {"object": "tests.test_configs:Config", "fields": [["a b", 2]]},
        {"object": "tests.test_configs:Config", "fields": 3},
        {"object": "tests.test_configs:Config", "base": 1, "fields": []},
        {"object": "tests.test_configs:Config", "call": 1},
        {"object": "tests.test_configs:Sizes", "fields": []},
        {"object": "tests.test_configs:Sizes", "base": 3, "fields": []},
        {"object": "tests.test_configs:Kind", "fields": []},
        {"object": "tests.test_configs:Quantization", "fields": [["other", 1]]},
        {"object": None},
        {"ndarray": "float32", "shape": [2], "data": "00"},
        {"ndarray": "float32", "shape": [-1], "data": ""},
        {"ndarray": "object", "shape": [], "data": ""},
        {"enum": "tests.test_configs:Kind", "member": "__class__"},
    ],
)
def test_a_malformed_config_is_rejected(document: Any) -> None:
    with pytest.raises(StructureError):
        rebuild_settings(document, setting_classes(Config))


def test_config_differences_are_merged_and_execution_is_not_rejected(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    def model(kind: str, eps: float) -> Any:
        class Layered(nnx.Module):
            def __init__(self) -> None:
                self.config = {"attn_mechanism": kind, "layers": [{"eps": eps}] * 9}
                self.layers = nnx.List(
                    nnx.LayerNorm(2, epsilon=eps, rngs=nnx.Rngs(0)) for _ in range(9)
                )

        return Layered()

    save_model(run, 1, model("vanilla", 1e-6)).result()

    with caplog.at_level(logging.INFO):
        restore_model(run, model=model("flash", 1e-6))
    assert "computed in another way than when it was saved: " in caplog.text
    assert "attn_mechanism: expected 'vanilla' as saved, got 'flash'" in caplog.text
    with pytest.raises(store.MismatchError) as e:
        restore_model(run, model=model("flash", 1e-3))
    text = str(e.value)
    assert "layers[{0..8}].eps: expected 1e-06 as saved, got 0.001" in text
    assert "layers/{0..8}/epsilon: expected 1e-06 as saved, got 0.001" in text
    assert "attn_mechanism" not in text


def test_plain_settings_are_comparable_data() -> None:
    config = Config(kind=Kind.EXACT, level=Level.HIGH, of=len)

    plain = dict(plain_settings(encode_settings(config))["dict"])

    assert ("exact", "HIGH") == (plain["kind"], plain["level"])
    assert "opaque" in plain["of"]


@pytest.mark.parametrize(
    "config",
    [
        {"object": "x", "fields": 3},
        {"object": "x", "fields": [1]},
        {"object": "x", "base": [1], "fields": []},
        {"enum": "x", "member": [1]},
        {"named_tuple": "x", "items": 3},
        {"ordered_dict": 3},
        {"ndarray": []},
        {"tuple": [{"object": "x", "fields": {"a": 1}}]},
    ],
)
def test_a_malformed_config_is_rejected_where_it_is_compared(
    run: store.Run, config: Any
) -> None:
    model = Model(Config(), rngs=nnx.Rngs(0))
    recipe = Recipe.from_graph(*nnx.split(model, nnx.Param, ...))
    state = {"graphstate": model.linear.kernel[...]}
    document = replace(recipe, config=config).pack()
    run.save(1, state, document=document).result()

    with pytest.raises(store.StoreError):
        restore_model(run, model=model)


class Optional(nnx.Module):
    """A model that does not need its config and does not store it."""

    def __init__(self, config: Config | None = None, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 4 if config is None else config.width, rngs=rngs)


def test_a_config_that_a_class_need_not_have_need_not_be_saved(run: store.Run) -> None:
    save_model(run, 1, Optional(rngs=nnx.Rngs(0)), rehearse="strict").result()

    assert (2, 4) == restore_model(run, model=Optional).linear.kernel.shape


def test_the_call_of_a_factory_names_what_the_class_needs() -> None:
    class Typed(nnx.Module):
        def __init__(
            self, config: Any, width: int, dtype: Any = None, *, rngs: nnx.Rngs
        ) -> None: ...

    assert (
        "lambda: Typed(config=config, width=width, rngs=nnx.Rngs(0), dtype=dtype)"
        == factory_text(Typed)
    )


class Broken(nnx.Module):
    """A model that accepts fewer configs than it saved."""

    config_class = Config
    limit: ClassVar[int] = 9

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        if config.width > self.limit:
            raise ValueError(f"expected at most {self.limit}\nmore lines")
        self.config = config
        self.linear = nnx.Linear(2, config.width, rngs=rngs)


def test_a_class_that_rejects_its_config_is_an_error_with_the_factory(
    run: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(run, 1, Broken(Config(8), rngs=nnx.Rngs(0))).result()
    monkeypatch.setattr(Broken, "limit", 5)

    with pytest.raises(store.MismatchError) as e:
        restore_model(run, model=Broken)

    assert (
        "model=Broken: expected a class that accepts the saved config and dtypes, got "
        "ValueError: expected at most 5; give a factory, model=lambda: "
        "Broken(config=config, rngs=nnx.Rngs(0))"
    ) == str(e.value)


def test_a_factory_that_needs_values_or_changes_others_is_rejected(
    run: store.Run,
) -> None:
    save_model(run, 1, Model(Config(), rngs=nnx.Rngs(0))).result()
    rngs = nnx.Rngs(0)

    def needs() -> Any:
        return Model(Config(int(jnp.ones(()) * 4)), rngs=nnx.Rngs(0))

    def changes() -> Any:
        return Model(Config(), rngs=rngs)

    with pytest.raises(
        store.InvalidRequestError, match="code that needs concrete values"
    ):
        restore_model(run, model=needs)
    with pytest.raises(store.InvalidRequestError, match="created outside of it"):
        restore_model(run, model=changes)


def test_a_state_without_a_model_is_restored_as_dicts_and_lists(run: store.Run) -> None:
    save_model(run, 1, Model(Config(), rngs=nnx.Rngs(0))).result()

    back = restore_state(run)

    assert (2, 4) == back["graphstate"]["linear"]["kernel"]["value"].shape
    with pytest.raises(store.InvalidRequestError, match="expected model= with tx="):
        restore_state(run, tx=object())
    with pytest.raises(store.InvalidRequestError, match="with state_class="):
        restore_state(run, state_class=dict)


@dataclass
class Named:
    kind: Kind = Kind.FAST
    parts: list[Quantization] = field(default_factory=list)
    by_name: dict[str, "Vision"] | None = None


def test_the_classes_of_a_config_are_those_that_it_names() -> None:
    names = {name.partition(":")[2] for name in setting_classes(Named)}

    assert {"Named", "Kind", "Quantization", "Vision", "Level"} == names
