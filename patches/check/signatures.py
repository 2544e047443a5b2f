"""Calls between our code and an upstream: do the arguments fit the signatures?"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from patches.check.contract import AbsentError, Use, resolve


@dataclass(frozen=True)
class Call(Use):
    """We call a function or class with these arguments: ``module:function(x, y, key=z)``.

    Only the number of positional arguments and the names of the others mean something.
    """

    text: str

    def fault(self) -> str:
        """Whether the arguments bind."""
        module, _, text = self.text.partition(":")
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call), self.text
        function = f"{module}:{ast.unparse(call.func)}"
        signature = _signature(function)
        if problem := _binding_fault(signature, call):
            return f"we call {text} and {function} takes {signature} ({problem})"
        return ""


@dataclass(frozen=True)
class Override(Use):
    """Our function or class stands in for the upstream's, whose callers it must satisfy.

    Required arguments may come by position or by name, optional ones by name.
    """

    ours: str
    upstream: str

    def fault(self) -> str:
        """Whether ours takes what the upstream's takes."""
        ours, theirs = (_bound_signature(path) for path in (self.ours, self.upstream))
        for place, parameter in enumerate(theirs.parameters.values()):
            if not _accepts(ours, parameter, place):
                return f"{self.upstream} takes {theirs}, with {parameter}, and {self.ours} {ours}"
        for name, parameter in ours.parameters.items():
            if not _is_optional(parameter) and name not in theirs.parameters:
                return f"{self.upstream} takes {theirs} and {self.ours} waits for {name}"
        return ""


@dataclass(frozen=True)
class Callback(Use):
    """``caller``, an upstream function, class or module, calls ours by the last part of its name.

    ``passes`` are parameters of ours whose default would hide that they are no longer passed.
    """

    ours: str
    caller: str
    passes: tuple[str, ...] = ()

    def fault(self) -> str:
        """Whether every such call in the source of the caller binds to ours."""
        name = self.ours.rpartition(":")[2].rpartition(".")[2]
        signature = _bound_signature(self.ours)
        calls = list(_calls_of(name, self.caller))
        if not calls:
            return f"{self.caller} no longer calls {name}, which {self.ours} waits for"
        for call in calls:
            if problem := _binding_fault(signature, call, self.passes):
                return (
                    f"{self.caller} calls {ast.unparse(call)} and {self.ours} takes {signature} "
                    f"({problem})"
                )
        return ""


def _signature(path: str) -> inspect.Signature:
    try:
        return inspect.signature(resolve(path))
    except (TypeError, ValueError) as error:
        raise AbsentError(f"we use {path}, which is no Python function ({error})") from error


def _bound_signature(path: str) -> inspect.Signature:
    """The signature of a function, or of a method as its instance shows it."""
    signature = _signature(path)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name == "self":
        return signature.replace(parameters=parameters[1:])
    return signature


def _binding_fault(
    signature: inspect.Signature, call: ast.Call, needed: tuple[str, ...] = ()
) -> str:
    """Why the arguments of a call do not bind, or leave out a needed one; empty if they fit.

    Of a call that unpacks arguments only the others are known.
    """
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    placed = [each for each in call.args if not isinstance(each, ast.Starred)]
    unpacks = len(named) + len(placed) < len(call.keywords) + len(call.args)
    try:
        bind = signature.bind_partial if unpacks else signature.bind
        passed = bind(*placed, **named).arguments
    except TypeError as error:
        return str(error)
    absent = [name for name in needed if name not in passed and not unpacks]
    return f"nothing is passed for {', '.join(absent)}" if absent else ""


def _is_optional(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return variadic or parameter.default is not parameter.empty


def _accepts(ours: inspect.Signature, theirs: inspect.Parameter, place: int) -> bool:
    """Whether ours takes the upstream's parameter number ``place`` as its callers may pass it."""
    parameters = list(ours.parameters.values())
    kinds = [each.kind for each in parameters]
    if theirs.kind in (theirs.VAR_POSITIONAL, theirs.VAR_KEYWORD):
        return theirs.kind in kinds
    by_name = theirs.name in ours.parameters or theirs.VAR_KEYWORD in kinds
    if theirs.kind is theirs.KEYWORD_ONLY or theirs.default is not theirs.empty:
        return by_name
    placed = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_place = (
        placed[place] == theirs.name if place < len(placed) else theirs.VAR_POSITIONAL in kinds
    )
    return by_place and by_name


def _calls_of(name: str, caller: str) -> Iterator[ast.Call]:
    """Every call of something with that name in the source of a function, class or module."""
    try:
        source = inspect.getsource(resolve(caller))
    except (TypeError, OSError) as error:
        raise AbsentError(f"{caller} should call us and has no source ({error})") from error
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called == name:
                yield node
