"""Recurrent and convolutional layers of transformers' models over states in the arena.

Most of them run flat (`flat_mixers.py`). Here is what is common to all, and how the others run.

Nearly all of the library's recurrent mixers speak to its cache by a few methods (`get_conv_state`,
`update_recurrent_state`, ...). They take several sequences of one length at a time, so the flat
batch [1, T] of a step is cut into groups of rows (`StateRows`): all that decode one token, and each
chunk of a prompt alone. The library's own forward runs once a group, with a stand-in for its cache
that holds what these rows' slots hold; what it leaves there goes back to the slots. Everything else
of the model runs flat.

A mixer is found by what its code asks its cache for, never by its name. `state_shapes` finds what
it keeps: it runs once on meta, with a stand-in that takes notes.

Does not know slots, snapshots or steps, nor which models come out right.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from engine.memory import KvPlan
from engine.pack import StateKey
from kernels.mixer_operations import MIXER_REFERENCE, MixerOperations
from kernels.mixer_state import MixerState
from kernels.state_rows import StateBatch, StateRows, read_states, write_states

StateShape: TypeAlias = tuple[tuple[int, ...], torch.dtype]

_PROTOCOL = frozenset(
    {
        "get_conv_state",
        "update_conv_state",
        "get_recurrent_state",
        "update_recurrent_state",
        "get_linear_cache",
        "set_linear_cache",
    }
)
_CACHES = ("cache_params", "past_key_values", "past_key_value")
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"
CONV, RECURRENT = "conv", "recurrent"


def mixers(model: nn.Module) -> Iterator[Any]:
    """Modules that keep a state of their layer."""
    return modules_using(model, _PROTOCOL)


@functools.cache
def may_keep_states(modelling: ModuleType) -> bool:
    """Whether some class of a modelling file keeps a state of its layer; builds nothing."""
    found = vars(modelling).values()
    kinds = (kind for kind in found if isinstance(kind, type) and issubclass(kind, nn.Module))
    return any(_speaks(kind, _PROTOCOL) for kind in kinds if kind is not nn.Module)


def attending_layers(model: nn.Module) -> set[int]:
    """Layers with a module that calls attention through the library's interface."""
    return {module.layer_idx for module in modules_using(model, frozenset({_ATTENTION}))}


def modules_using(model: nn.Module, names: frozenset[str]) -> Iterator[Any]:
    """Modules of one layer whose code uses one of these names."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and _speaks(type(module), names):
            yield module


def _speaks(kind: type, names: frozenset[str]) -> bool:
    """Whether a method of the class, or of one below nn.Module, uses one of these names."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and not names.isdisjoint(code.co_names):
                return True
    return False


class LayerStates:
    """Stands for the library's cache: the states of one layer for a group of rows.

    `read` gives what a state is before the rows, None where they begin; what it is after them is in
    `after` then.
    """

    def __init__(self, fresh: bool, read: Callable[[str], torch.Tensor]) -> None:
        self._fresh = fresh
        self._read = read
        self.after: dict[str, torch.Tensor] = {}

    def _get(self, name: str) -> torch.Tensor | None:
        if name not in self.after:
            if self._fresh:
                return None
            self.after[name] = self._read(name)  # changed in place, or exchanged
        return self.after[name]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[n, channels, kernel]"""
        return self._get(_name(CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[n, heads, ...]"""
        return self._get(_name(RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What was kept with the new inputs behind it; the last `conv_kernel_size` are kept."""
        name = _name(CONV, state_idx)
        before = self._get(name)
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, conv_states], dim=-1)
        self.after[name] = whole[..., -size:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Exchange it."""
        self.after[_name(RECURRENT, state_idx)] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """An older name of `get_recurrent_state`."""
        return self._get(RECURRENT)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """An older name of `update_recurrent_state`."""
        self.after[RECURRENT] = linear_cache

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether the rows do not begin here."""
        return not self._fresh

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is rolled back."""
        return False


def _name(kind: str, number: int) -> str:
    return f"{kind}{number or ''}"


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of a step: `batches` by state group.

    operations   for mixers that run flat (`flat_mixers.py`); the others are cut by rows
    """

    arena: torch.Tensor
    plan: KvPlan
    batches: tuple[StateBatch, ...]
    rows: tuple[StateRows, ...]
    operations: MixerOperations = MIXER_REFERENCE

    def state_of(self, key: StateKey) -> MixerState:
        """One state of a layer, for kernels."""
        group, place = self.plan.state_place[key]
        plan, batch = self.plan.states[group], self.batches[group]
        table = batch.table[plan.table_rows(place)]
        return MixerState(self.arena, plan.geometry, table, batch)

    def read(self, key: StateKey, rows: StateRows) -> torch.Tensor:
        """A copy of a layer's state for these rows, [n, *shape]."""
        state = self.state_of(key)
        return read_states(state.arena, state.geometry, state.table, state.batch, rows.rows)

    def write(self, key: StateKey, rows: StateRows, states: torch.Tensor) -> None:
        """Keep it."""
        state = self.state_of(key)
        write_states(state.arena, state.geometry, state.table, state.batch, rows.rows, states)


class RowSplit:
    """The forward of a mixer, cut by groups of rows. `step`: the states of the step that runs."""

    def __init__(self, mixer: Any, step: Callable[[], StepStates]) -> None:
        self._layer: int = mixer.layer_idx
        self._forward: Callable[..., Any] = mixer.forward
        self._signature = inspect.signature(mixer.forward)
        self._hidden = next(iter(self._signature.parameters))
        self._cache = cache_of(self._signature)
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """hidden [1, T, H] -> as the mixer gives it, for all tokens: a tensor, or several of which
        those that are not of tokens are left out."""
        given = self._signature.bind(*args, **kwargs)
        hidden = given.arguments[self._hidden]
        if "attention_mask" in given.arguments:
            given.arguments["attention_mask"] = None
        step = self._step()
        outputs: list[Any] = []
        for rows in step.rows:
            states = LayerStates(rows.fresh, partial(self._read, step, rows))
            given.arguments[self._hidden] = hidden[0][rows.tokens]
            given.arguments[self._cache] = states
            output = self._forward(*given.args, **given.kwargs)
            for name, after in states.after.items():
                step.write((self._layer, name), rows, after)
            outputs.append(output)
        if not isinstance(outputs[0], tuple):
            return _joined(outputs, step.rows, hidden.shape[1])
        return tuple(
            _joined(parts, step.rows, hidden.shape[1]) for parts in zip(*outputs, strict=True)
        )

    def _read(self, step: StepStates, rows: StateRows, name: str) -> torch.Tensor:
        return step.read((self._layer, name), rows)


def _joined(parts: Sequence[Any], rows: Sequence[StateRows], num_tokens: int) -> Any:
    """[n, q, ...] of each group of rows as [1, T, ...]; None where they are something else."""
    joined: torch.Tensor | None = None
    for part, group in zip(parts, rows, strict=True):
        if not isinstance(part, torch.Tensor) or part.shape[:2] != group.tokens.shape:
            return None
        if joined is None:
            joined = part.new_empty(num_tokens, *part.shape[2:])
        joined[group.tokens] = part
    return None if joined is None else joined[None]


def cache_of(signature: inspect.Signature) -> str:
    """The name of the parameter that takes the library's cache."""
    return next(name for name in signature.parameters if name in _CACHES)


def state_shapes(
    model: nn.Module, hidden_size: int, dtype: torch.dtype = torch.bfloat16
) -> Mapping[StateKey, StateShape]:
    """What each mixer of a skeleton keeps of a sequence in a model of this dtype: the shape and
    dtype of each of its states. The skeleton's weights are not read, and may be anywhere."""
    kept: dict[StateKey, StateShape] = {}
    known: dict[Any, dict[str, StateShape]] = {}
    for mixer in mixers(model):
        alike = _alike(mixer)
        if alike not in known:
            known[alike] = _kept_by(mixer, hidden_size, dtype)
        kept |= {(mixer.layer_idx, name): shape for name, shape in known[alike].items()}
    return kept


def read_linears(model: Any) -> frozenset[str]:
    """Names of weights of mixers' linears that are read as tensors and never called: they must stay
    as they are."""
    found: set[str] = set()
    known: dict[Any, list[str]] = {}
    kept = {id(mixer) for mixer in mixers(model)}
    for name, mixer in model.named_modules():
        if id(mixer) in kept:
            alike = _alike(mixer)
            if alike not in known:
                known[alike] = _uncalled(mixer, model.config.get_text_config().hidden_size)
            found |= {f"{name}.{path}.weight" for path in known[alike]}
    return frozenset(found)


def _uncalled(mixer: nn.Module, hidden_size: int) -> list[str]:
    twin, called = _twin(mixer, torch.bfloat16), set[nn.Module]()

    def note(part: nn.Module, inputs: Any, output: Any) -> None:
        called.add(part)

    linears = {path: part for path, part in twin.named_modules() if type(part) is nn.Linear}
    for part in linears.values():
        part.register_forward_hook(note)
    _run(twin, LayerStates(True, _nothing), hidden_size, torch.bfloat16)
    return [path for path, part in linears.items() if part not in called]


def _alike(mixer: nn.Module) -> Any:
    """Mixers of which this is the same do the same, and keep the same."""
    return type(mixer), *((name, p.shape) for name, p in mixer.named_parameters())


def _twin(mixer: nn.Module, dtype: torch.dtype) -> Any:
    """A copy without weights, with the library's own forward."""
    split = vars(mixer).pop("forward", None)
    twin: Any = copy.deepcopy(mixer).to("meta", dtype)
    if split is not None:
        mixer.forward = split
    return twin


def _run(twin: Any, states: LayerStates, hidden_size: int, dtype: torch.dtype) -> None:
    """Two tokens of a sequence that begins."""
    parameters = list(inspect.signature(twin.forward).parameters.values())
    given: dict[str, Any] = {
        each.name: None
        for each in parameters[1:]
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    }
    given[cache_of(inspect.signature(twin.forward))] = states
    with torch.no_grad():
        twin.forward(torch.empty(1, 2, hidden_size, dtype=dtype, device="meta"), **given)


def _kept_by(mixer: nn.Module, hidden_size: int, dtype: torch.dtype) -> dict[str, StateShape]:
    states = LayerStates(True, _nothing)
    _run(_twin(mixer, dtype), states, hidden_size, dtype)
    return {name: (tuple(after.shape[1:]), after.dtype) for name, after in states.after.items()}


def _nothing(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} of a sequence that begins")
