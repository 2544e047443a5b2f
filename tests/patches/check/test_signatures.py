"""A changed signature or attribute is found by name; what fits is left in peace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.check.attributes import Attributes
from patches.check.contract import Use, faults, require_known_upstream
from patches.check.signatures import Call, Callback, Override, _accepts
from patches.errors import PatchError

Module = Callable[[str], str]
_numbers = count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Write a module that can be imported, and return its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        name = f"upstream_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def only_fault(use: Use) -> str:
    """The fault of a use in any release; empty if it fits."""
    return "; ".join(faults([use], "1.0"))


@pytest.mark.parametrize(
    ("definition", "fault"),
    [
        ("def send(rows, group, *, splits=None): ...", ""),
        ("def send(rows, *args, **options): ...", ""),
        ("class send:\n  def __init__(self, rows, group, splits): ...", ""),
        ("from dataclasses import dataclass\n@dataclass\nclass send:\n  a: int\n  b: int\n"
         "  splits: int", ""),
        ("def send(rows, group, *, sizes=None): ...", "unexpected keyword argument 'splits'"),
        ("def send(rows, *, group, splits): ...", "too many positional arguments"),
        ("def send(rows, group, splits, stream): ...", "missing a required argument: 'stream'"),
        ("send = 3", "is no Python function"),
        ("def sent(): ...", "has no attribute 'send'"),
        ("import nothing_like_this", "ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_a_call_that_we_make_must_bind(module: Module, definition: str, fault: str) -> None:
    name = module(definition)
    found = only_fault(Call(f"{name}:send(rows, group, splits=sizes)"))
    assert bool(found) == bool(fault)
    assert fault in found
    if fault:
        assert f"{name}:send" in found


BASE = "class Base:\n  def apply(self, layer, batch, dtype=None): ...\n"


@pytest.mark.parametrize(
    ("signature", "fault"),
    [
        ("self, layer, batch, dtype=None", ""),
        ("self, layer, batch, dtype=None, ours=1", ""),
        ("self, layer, batch, **options", ""),
        ("self, *args, **options", ""),
        ("self, layer, batch, *, dtype=None", ""),
        ("self, layer, batch", "with dtype=None"),
        ("self, layer, dtype=None", "with batch"),
        ("self, batch, layer, dtype=None", "with layer"),
        ("self, layer, tokens, dtype=None", "with batch"),
        ("self, layer, batch, dtype=None, *, more", "waits for more"),
    ],
)
def test_an_override_must_take_what_the_base_takes(
    module: Module, signature: str, fault: str
) -> None:
    name = module(f"{BASE}class Ours(Base):\n  def apply({signature}): ...\n")
    found = only_fault(Override(f"{name}:Ours.apply", f"{name}:Base.apply"))
    assert bool(found) == bool(fault)
    assert fault in found
    if fault:
        assert f"{name}:Base.apply takes (layer, batch, dtype=None)" in found


_NAMES = ("a", "b", "c", "d")


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    """Any signature with some of four names, in any order."""
    names = draw(st.permutations(_NAMES).map(lambda order: order[: draw(st.integers(0, 4))]))
    required = draw(st.integers(0, len(names)))
    words = [name if place < required else f"{name}=0" for place, name in enumerate(names)]
    words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(["", "*", "*args"])))
    if words[-1:] == ["*"]:
        words.pop()
    words.append(draw(st.sampled_from(["", "**options"])))
    source = f"lambda {', '.join(filter(None, words))}: 0"
    return inspect.signature(eval(source))


@settings(max_examples=300)
@given(signatures(), signatures())
def test_what_is_accepted_binds_in_every_way_a_caller_may_pass_it(
    ours: inspect.Signature, theirs: inspect.Signature
) -> None:
    """Required arguments by position as far as they may be, the rest by name."""
    parameters = list(theirs.parameters.values())
    if all(_accepts(ours, each, place) for place, each in enumerate(parameters)):
        named = [each for each in parameters if each.name in _NAMES]
        placed = [
            each
            for each in named
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
        ]
        for by_place in range(len(placed) + 1):
            rest = [each.name for each in named if each not in placed[:by_place]]
            passed = ours.bind_partial(
                *(each.name for each in placed[:by_place]), **{name: name for name in rest}
            )
            assert all(passed.arguments.get(each.name, each.name) == each.name for each in named)


CALLER = "class Layer:\n  def __init__(self, method, **rest):\n    method.create({})\n"
OURS = "class Ours:\n  def create(self, layer, size, bias=False, **more): ...\n"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("layer=self, size=3, bias=True", ""),
        ("self, 3, True, other=1", ""),
        ("self, 3, **rest", ""),
        ("layer=self, size=3", "nothing is passed for bias"),
        ("layer=self, size=3, with_bias=True", "nothing is passed for bias"),
        ("layer=self, width=3, bias=True", "missing a required argument: 'size'"),
        ("self, 1, 2, 3", "too many positional arguments"),
        ("1, 2, 3, 4, **rest", "too many positional arguments"),
    ],
)
def test_what_the_upstream_passes_to_our_function_must_bind(
    module: Module, arguments: str, fault: str
) -> None:
    ours, theirs = module(OURS), module(CALLER.format(arguments))
    use = Callback(f"{ours}:Ours.create", f"{theirs}:Layer.__init__", ("bias",))
    found = only_fault(use)
    assert bool(found) == bool(fault)
    assert fault in found
    if fault:
        assert f"{theirs}:Layer.__init__ calls method.create({arguments})" in found


def test_an_upstream_that_no_longer_calls_our_function_is_found(module: Module) -> None:
    ours, theirs = module(OURS), module("def build(method):\n  method.make()\n")
    found = only_fault(Callback(f"{ours}:Ours.create", f"{theirs}:build"))
    assert f"{theirs}:build no longer calls create" in found
    assert "has no source" in only_fault(Callback(f"{ours}:Ours.create", "builtins:len"))


OWNER = """
import functools
import msgspec
import dataclasses
limit = 1
@dataclasses.dataclass
class Data:
    declared: int
class Struct(msgspec.Struct):
    field: int
class Base:
    __slots__ = ("slot",)
    def __init__(self): self.inherited = 1
class Owner(Base):
    constant = 1
    annotated: int
    def start(self, other):
        self.set_later = other.only_read
        other.set_elsewhere = self.set_later
        self.set_later.set_below = lambda: self
    @property
    def answer(self): self.behind_property = 1
    @functools.wraps(start)
    def wrapped(self): self.hidden = 1
    @classmethod
    def make(cls): cls.made = 1
"""


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("", ("limit", "Owner")),
        ("Data", ("declared",)),
        ("Struct", ("field",)),
        ("Owner", ("constant", "annotated", "set_later", "answer", "start", "made")),
        ("Owner", ("inherited", "slot", "behind_property")),
    ],
)
def test_attributes_that_a_class_declares_or_sets_are_known(
    module: Module, owner: str, names: tuple[str, ...]
) -> None:
    assert only_fault(Attributes(f"{module(OWNER)}:{owner}", names)) == ""


@pytest.mark.parametrize("name", ["only_read", "set_elsewhere", "set_below", "set_late"])
def test_an_attribute_that_nobody_sets_is_named_with_its_like(module: Module, name: str) -> None:
    found = only_fault(Attributes(f"{module(OWNER)}:Owner", ("constant", name)))
    assert f"we use {name} of " in found
    assert "has no such attribute" in found
    if name == "set_late":
        assert "set_later" in found


@pytest.mark.parametrize(
    ("version", "since", "before", "concerned"),
    [
        ("0.5.21", "", "", True),
        ("0.5.21", "0.5.21", "", True),
        ("0.5.21", "0.5.23", "", False),
        ("0.5.9", "0.5.21", "", False),
        ("0.5.17", "", "0.5.21", True),
        ("0.5.21", "", "0.5.21", False),
        ("0.16.1", "0.17", "", False),
        ("0.19.2", "0.17", "", True),
    ],
)
def test_a_use_concerns_the_releases_it_says(
    version: str, since: str, before: str, concerned: bool
) -> None:
    use = Attributes("builtins:", ("no_such_thing",), since=since, before=before)
    assert bool(list(faults([use], version))) == concerned


def test_the_error_names_everything_that_is_different_and_the_way_out(module: Module) -> None:
    name = module("def send(rows): ...\nclass Req: ...\n")
    uses = (Call(f"{name}:send(rows, group)"), Attributes(f"{name}:Req", ("rid",)))
    for target in ("sglang", "megatron-core"):
        with pytest.raises(PatchError) as error:
            require_known_upstream(target, uses)
        sentence = str(error.value)
        assert f"{target} " in sentence
        assert f"we call send(rows, group) and {name}:send takes (rows)" in sentence
        assert f"we use rid of {name}:Req" in sentence
        assert "report this" in sentence
