"""The worker protocol's bytes: every message there and back, everything else refused."""

import subprocess
import sys
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import (
    Abort,
    AckUsage,
    AdoptUsage,
    Constraint,
    EncodeInputs,
    Finish,
    FromWorker,
    Hello,
    LoadModel,
    SamplingParams,
    StepOutput,
    Submit,
    TokenDelta,
    TokenLogprobs,
    ToWorker,
    Usage,
    WarmModel,
    decode_from_worker,
    decode_to_worker,
    encode,
)

SCALARS: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(exclude_categories=["Cs"])),
    bool: st.booleans(),
    bytes: st.binary(max_size=16),
    NoneType: st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation that occurs in the protocol."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    return st.builds(kind, **{f.name: values(f.type) for f in msgspec.structs.fields(kind)})


TO_WORKER = st.one_of([values(kind) for kind in get_args(ToWorker)])
FROM_WORKER = st.one_of([values(kind) for kind in get_args(FromWorker)])


@pytest.mark.parametrize("kind", get_args(ToWorker), ids=lambda kind: kind.__name__)
def test_each_message_to_a_worker(kind: Any) -> None:
    @given(values(kind))
    def there_and_back(message: ToWorker) -> None:
        assert decode_to_worker(encode(message)) == message
        assert type(decode_to_worker(memoryview(encode(message)))) is kind

    there_and_back()


@pytest.mark.parametrize("kind", get_args(FromWorker), ids=lambda kind: kind.__name__)
def test_each_message_from_a_worker(kind: Any) -> None:
    @given(values(kind))
    def there_and_back(message: FromWorker) -> None:
        assert decode_from_worker(encode(message)) == message
        assert type(decode_from_worker(memoryview(encode(message)))) is kind

    there_and_back()


@given(TO_WORKER, FROM_WORKER)
def test_a_message_never_reads_as_one_of_the_other_direction(
    inward: ToWorker, outward: FromWorker
) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_from_worker(encode(inward))
    with pytest.raises(msgspec.ValidationError):
        decode_to_worker(encode(outward))


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_one_error(frame: bytes) -> None:
    for decode in (decode_to_worker, decode_from_worker):
        with pytest.raises(msgspec.DecodeError):
            decode(frame)


@given(TO_WORKER, st.data())
def test_a_cut_frame_is_refused(message: ToWorker, data: st.DataObject) -> None:
    frame = encode(message)
    with pytest.raises(msgspec.DecodeError):
        decode_to_worker(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(msgspec.DecodeError):
        decode_to_worker(frame + b"\x00")


@given(TO_WORKER, st.data())
def test_a_flipped_byte_is_refused_or_still_a_message(
    message: ToWorker, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode_to_worker(bytes(frame))
    except msgspec.DecodeError:
        return
    assert isinstance(decoded, get_args(ToWorker))


@pytest.mark.parametrize(
    "frame",
    [
        b"\x94\xa5Hello\x01\xa1g" + b"\x91" * 100_000 + b"\xc0",  # deeper than the stack
        b"\x93\xa5Hello\x01\xa2\xff\xfe",  # a text that is not UTF-8
        b"\x92\xaaSetCatalog\xdd\xff\xff\xff\xff",  # four thousand million items, none there
        b"\x93\xa5Hello\xa11\xa1g",  # "1" for 1
        b"\x92\xa5Hello\x01",  # a field short
        b"\x91\xa6Shrink",  # no such message
    ],
)
def test_what_a_hostile_peer_would_send(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_worker(frame)


def test_the_bytes_on_the_wire() -> None:
    """Both sides may be of different builds: a change here needs a new PROTOCOL_VERSION."""
    assert encode(Hello(1, "g")) == b"\x96\xa5Hello\x01\xa1g\xc2\x00\x00"
    assert encode(Abort("r", 2)) == b"\x93\xa5Abort\xa1r\x02"
    assert encode(AckUsage([("r", 2)])) == b"\x92\xa8AckUsage\x91\x92\xa1r\x02"
    assert encode(AdoptUsage("g", ["r"])) == b"\x93\xaaAdoptUsage\xa1g\x91\xa1r"
    nothing = b"\xcb" + bytes(8)  # a float of 0
    assert encode(LoadModel("m")) == b"\x97\xa9LoadModel\xa1m" + 2 * nothing + b"\xc2\xc2\xc2"
    assert encode(WarmModel("m")) == b"\x92\xa9WarmModel\xa1m"
    submit = Submit("r", 1, "t", "m", [5], 3, SamplingParams(0.0, 1.0, 9), [2])
    zero, one = b"\xcb" + bytes(8), b"\xcb\x3f\xf0" + bytes(6)
    assert encode(submit) == (
        (b"\xdc\x00\x11\xa6Submit\xa1r\x01\xa1t\xa1m\x91\x05\x03\x9a" + zero + one + b"\x09")
        + (b"\x00" + zero * 3 + one + b"\x80\x00")  # top_k to min_tokens
        + b"\x91\x02\xff\xff\xc0"
        + zero
        + b"\xc0\x90\x00"
        + b"\xc2"  # is_batch
    )
    constrained = msgspec.structs.replace(submit, constraint=Constraint("regex", "a"))
    assert encode(constrained) == (
        encode(submit)[:-14] + b"\x92\xa5regex\xa1a" + zero + b"\xc0\x90\x00\xc2"
    )
    encoder = msgspec.structs.replace(submit, encode=EncodeInputs([1], [0]))
    assert encode(encoder) == encode(submit)[:-4] + b"\x93\x91\x01\x91\x00\xc2\x90\x00\xc2"
    resumed = msgspec.structs.replace(submit, generated=[7, 8], cached_tokens=1)
    assert encode(resumed) == encode(submit)[:-3] + b"\x92\x07\x08\x01\xc2"
    logprobs = TokenLogprobs(-0.5, [(4, -0.5)])
    delta = TokenDelta("r", 1, [4], Finish("stop", Usage(1, 0, 1, 0.0)), [logprobs])
    assert encode(StepOutput("e", [delta])) == (
        b"\x93\xaaStepOutput\xa1e\x91\x98\xa1r\x01\x91\x04\x93\xa4stop\x97\x01\x00\x01"
        + zero * 4
        + b"\xa0"
        + b"\x91\x92"
        + (b"\xcb\xbf\xe0" + bytes(6))
        + b"\x91\x92\x04"
        + (b"\xcb\xbf\xe0" + bytes(6))
        + b"\x90\xc4\x00\x00"
    )
    rows = TokenDelta("r", 1, [], Finish("stop", Usage(1, 0, 0, 0.0)), vectors=b"\x00\x01")
    assert encode(StepOutput("e", [rows])).endswith(b"\xa0\x90\x90\xc4\x02\x00\x01\x00")
    first = TokenDelta("r", 1, [4], cached_tokens=3)
    assert encode(StepOutput("e", [first])).endswith(b"\x91\x04\xc0\x90\x90\xc4\x00\x03")


def test_the_gateway_can_import_it_without_torch() -> None:
    code = "import sys, engine.protocol; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
