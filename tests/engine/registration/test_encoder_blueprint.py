"""Registration of encoders: what a folder asks for, whose names are whose, and what is refused."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    ModernBertForMaskedLM,
    PretrainedConfig,
    RobertaForMaskedLM,
)

from engine.encoders import encoder_model
from engine.errors import RegistrationRefused
from engine.pack import EncoderRecord, PackIndex
from engine.registration import main as register
from engine.registration.convert import inspect, write_pack
from engine.registration.parity import probe_encoder
from kernels.ragged_attention import Groups, ragged_attention_ref
from tests.engine.encoder_rig import (
    POSITIONS,
    VOCAB,
    classifier_configs,
    family_configs,
    save_encoder,
    save_tokenizer,
)
from tests.engine.pack_rig import edit_json

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


def describe(
    folder: Path,
    pooling: dict[str, Any],
    modules: list[dict[str, str]] | None = None,
    **length: Any,
) -> None:
    """sentence-transformers' files."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules or [TRANSFORMER, POOLING]))
    (folder / "sentence_bert_config.json").write_text(json.dumps(length))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A bare encoder."""
    save_encoder(family_configs()["bert"], tmp_path / "bert", 0)
    return tmp_path / "bert"


def pack_of(folder: Path) -> PackIndex:
    _, index = write_pack(inspect(folder), folder.parent / "packs", "float32", lambda *_: None)
    return index


@pytest.mark.parametrize("name", family_configs())
@pytest.mark.parametrize("task", ["embed", "classify"])
def test_what_each_family_asks_for(tmp_path: Path, name: str, task: str) -> None:
    classify = task == "classify"
    config = (classifier_configs() if classify else family_configs())[name]
    save_encoder(config, tmp_path / "m", 0, classify)
    index = pack_of(tmp_path / "m")
    assert (index.task, index.max_context, index.kv_groups) == (task, POSITIONS, ())
    segments = {"bert": 2, "minilm": 2, "roberta": 1, "xlm-roberta": 1}.get(name, 0)
    if classify:
        pooling, labels = ("mean" if name == "modernbert" else "cls"), ("no", "yes", "perhaps")
        assert index.encoder == EncoderRecord(pooling, False, 3, labels, False, segments)
    else:
        assert index.encoder == EncoderRecord("mean", True, config.hidden_size, segments=segments)
    layers = [segment.name for segment in index.segments]
    assert layers == ["rest", *(f"layer.{i}" for i in range(config.num_hidden_layers))]
    assert not any("pooler" in tensor.name for tensor in index.tensors if not classify)
    assert probe_encoder(inspect(tmp_path / "m").blueprint) < 1e-5


def test_several_labels_at_once(tmp_path: Path) -> None:
    config = classifier_configs()["bert"]
    config.problem_type = "multi_label_classification"
    save_encoder(config, tmp_path / "m", 0, classify=True)
    encoder = pack_of(tmp_path / "m").encoder
    assert encoder is not None
    assert encoder.multi_label


@pytest.mark.parametrize(
    ("pooling", "modules", "expected"),
    [
        ({"pooling_mode_mean_tokens": True}, [TRANSFORMER, POOLING, NORMALIZE], ("mean", True, 32)),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
            None,
            ("cls", False, 32),
        ),
        ({"pooling_mode_max_tokens": True}, None, ("max", False, 32)),
        ({"pooling_mode_lasttoken": True}, None, ("last", False, 32)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, None, ("mean_sqrt_len", False, 32)),
        ({"pooling_mode_weightedmean_tokens": True}, None, ("weighted_mean", False, 32)),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            None,
            ("cls+mean", False, 64),
        ),
        ({"pooling_mode": "lasttoken"}, None, ("last", False, 32)),
        ({"pooling_mode": ["cls", "max"]}, None, ("cls+max", False, 64)),
    ],
)
def test_pooling_as_the_files_say(
    bert: Path,
    pooling: dict[str, Any],
    modules: list[dict[str, str]] | None,
    expected: tuple[str, bool, int],
) -> None:
    plain = pack_of(bert)
    describe(bert, pooling, modules, max_seq_length=20)
    index = pack_of(bert)
    assert index.encoder is not None
    assert (index.encoder.pooling, index.encoder.normalize, index.encoder.dim) == expected
    assert index.max_context == 20
    assert index.revision != plain.revision
    describe(bert, pooling, modules, max_seq_length=21)
    assert pack_of(bert).revision != index.revision, "the longest input is part of the model"
    describe(bert, pooling, modules, max_seq_length=1000)
    assert inspect(bert).blueprint.max_context == POSITIONS, "positions bound it anyhow"


@pytest.mark.parametrize(
    ("pooling", "modules", "length", "why"),
    [
        ({"pooling_mode_mean_tokens": True}, [TRANSFORMER, POOLING, DENSE], {}, "Dense"),
        ({"pooling_mode_mean_tokens": True}, [TRANSFORMER], {}, "has no Pooling module"),
        ({"pooling_mode_mean_tokens": True}, [POOLING, TRANSFORMER], {}, "in this order"),
        (
            {"pooling_mode_mean_tokens": True},
            [{**TRANSFORMER, "path": "0_Transformer"}, POOLING],
            {},
            "0_Transformer",
        ),
        ({"pooling_mode_mean_tokens": True}, [TRANSFORMER, {**POOLING, "path": "../x"}], {}, "x'"),
        ({"pooling_mode_median_tokens": True}, None, {}, "median"),
        ({"pooling_mode": "median"}, None, {}, "median"),
        ({}, None, {}, "none"),
        ({"pooling_mode_mean_tokens": True}, None, {"max_seq_length": 0}, "max_seq_length"),
        ({"pooling_mode_mean_tokens": True}, None, {"max_seq_length": "9"}, "max_seq_length"),
        ({"pooling_mode_mean_tokens": True}, None, {"do_lower_case": True}, "lower-cases"),
    ],
)
def test_files_that_cannot_be_followed(
    bert: Path,
    pooling: dict[str, Any],
    modules: list[dict[str, str]] | None,
    length: dict[str, Any],
    why: str,
) -> None:
    describe(bert, pooling, modules, **length)
    with pytest.raises(RegistrationRefused, match=why) as caught:
        inspect(bert)
    assert caught.value.code == "unknown_pooling"


@pytest.mark.parametrize("content", ["[", "{}", '{"type": 3}', "[3]", "[" * 100_000])
def test_damaged_files_are_refused(bert: Path, content: str) -> None:
    describe(bert, {"pooling_mode_mean_tokens": True})
    (bert / "modules.json").write_text(content)
    with pytest.raises(RegistrationRefused) as caught:
        inspect(bert)
    assert caught.value.code == "unknown_pooling"


def test_a_tokenizer_that_lowers_by_itself_may_be_told_to(bert: Path) -> None:
    describe(bert, {"pooling_mode_mean_tokens": True}, do_lower_case=True)
    edit_json(bert / "tokenizer.json", lambda it: it.update(normalizer={"type": "Lowercase"}))
    assert inspect(bert).blueprint.task == "embed"


def words(config: PretrainedConfig, kind: Any, folder: Path) -> Any:
    """A model with another head, saved."""
    torch.manual_seed(0)
    model = kind(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert", BertForMaskedLM),
        ("roberta", RobertaForMaskedLM),
        ("modernbert", ModernBertForMaskedLM),
    ],
)
def test_a_head_for_masked_words_is_left_out(tmp_path: Path, name: str, kind: Any) -> None:
    model = words(family_configs()[name], kind, tmp_path / "m")
    with pytest.raises(RegistrationRefused, match="masked language model") as caught:
        inspect(tmp_path / "m")
    assert caught.value.code == "unknown_family"
    describe(tmp_path / "m", {"pooling_mode_cls_token": True})
    pack_dir, index = write_pack(
        inspect(tmp_path / "m"), tmp_path / "packs", "float32", lambda *_: None
    )
    assert index.task == "embed"
    expected = model.base_model.state_dict()
    assert {tensor.name for tensor in index.tensors} == {n for n in expected if "pooler" not in n}
    blob = (pack_dir / "weights.bin").read_bytes()
    for tensor in index.tensors:
        start = index.segments[tensor.segment].offset + tensor.offset
        got = torch.frombuffer(
            bytearray(blob[start : start + tensor.num_bytes]), dtype=torch.float32
        )
        assert torch.equal(got.view(tensor.shape), expected[tensor.name])


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Other names in the files."""
    path = folder / "model.safetensors"
    save_file({change(n): t for n, t in load_file(path).items()}, path, {"format": "pt"})


def test_names_of_older_checkpoints(bert: Path) -> None:
    """With a prefix, LayerNorms as TensorFlow calls them, and buffers that are computed today."""
    names = {tensor.name for tensor in pack_of(bert).tensors}

    def older(name: str) -> str:
        for new, old in (
            ("LayerNorm.weight", "LayerNorm.gamma"),
            ("LayerNorm.bias", "LayerNorm.beta"),
        ):
            name = name.replace(new, old)
        return f"bert.{name}"

    rename(bert, older)
    path = bert / "model.safetensors"
    positions = {"bert.embeddings.position_ids": torch.arange(POSITIONS)[None]}
    pooler = {"bert.pooler.dense.weight": torch.zeros(32, 32)}
    save_file({**load_file(path), **positions, **pooler}, path, {"format": "pt"})
    assert {tensor.name for tensor in pack_of(bert).tensors} == names


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda tensors: tensors.pop("encoder.layer.1.output.dense.bias"), "bad_weights"),
        (lambda tensors: tensors.update({"classifier.weight": torch.zeros(2, 32)}), "bad_weights"),
        (lambda tensors: tensors.update({"encoder.layer.2.x": torch.zeros(2)}), "bad_weights"),
    ],
    ids=["missing", "another head", "left over"],
)
def test_tensors_missing_or_left_over(
    bert: Path, change: Callable[[dict[str, torch.Tensor]], object], code: str
) -> None:
    path = bert / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RegistrationRefused) as caught:
        pack_of(bert)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        ({"is_decoder": True}, "unknown_family", "decoder"),
        ({"position_embedding_type": "relative_key"}, "unknown_family", "relative_key"),
        ({"architectures": ["BertForQuestionAnswering"]}, "unknown_family", "QuestionAnswering"),
        ({"auto_map": {"AutoModel": "x.y"}}, "custom_code", "code"),
        ({"hidden_size": 0}, "bad_config", "hidden_size"),
        ({"num_attention_heads": 5}, "bad_config", "build"),
    ],
)
def test_configurations_that_are_refused(
    bert: Path, options: dict[str, Any], code: str, why: str
) -> None:
    edit_json(bert / "config.json", lambda config: config.update(options))
    with pytest.raises(RegistrationRefused, match=why) as caught:
        inspect(bert)
    assert caught.value.code == code


def test_heads_and_weights_that_are_refused(tmp_path: Path, bert: Path) -> None:
    words(BertConfig(**_small()), BertForTokenClassification, tmp_path / "tokens")
    with pytest.raises(RegistrationRefused, match="BertForTokenClassification"):
        inspect(tmp_path / "tokens")
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    with pytest.raises(RegistrationRefused) as caught:
        inspect(bert)
    assert caught.value.code == "pickle_weights"


def _small() -> dict[str, Any]:
    return {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": VOCAB,
    }


def test_positions_of_a_fairseq_family_without_room(tmp_path: Path) -> None:
    save_encoder(family_configs()["roberta"], tmp_path / "m", 0)
    edit_json(tmp_path / "m" / "config.json", lambda it: it.update(max_position_embeddings=2))
    with pytest.raises(RegistrationRefused, match="no position"):
        inspect(tmp_path / "m")


def test_rows_that_come_out_wrong_refuse_the_model(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_as_one(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: Groups,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        del groups
        return ragged_attention_ref(query, key, value, [(1, query.shape[1])], scale, window)

    monkeypatch.setattr(encoder_model, "ragged_attention_ref", all_as_one)
    with pytest.raises(RegistrationRefused, match="differs from transformers") as caught:
        probe_encoder(inspect(bert).blueprint)
    assert caught.value.code == "parity"


def test_what_the_registration_process_says(tmp_path: Path, bert: Path) -> None:
    save_encoder(classifier_configs(1)["bert"], tmp_path / "ranks", 0, classify=True)
    out = io.StringIO()
    sources = ["--source", str(bert), "--source", str(tmp_path / "ranks")]
    assert not register.main([*sources, "--dest", str(tmp_path / "packs")], out)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    ready = {event["source"]: event for event in events if event["event"] == "ready"}
    embeds, ranks = ready[str(bert)], ready[str(tmp_path / "ranks")]
    told = ("task", "dim", "labels", "multi_label", "max_context")
    assert [embeds[name] for name in told] == ["embed", 32, [], False, POSITIONS]
    assert [ranks[name] for name in told] == ["classify", 1, ["no"], False, POSITIONS]
    assert embeds["parity_error"] < 1e-5
    assert (Path(embeds["pack_dir"]) / "tokenizer.json").is_file()


def test_the_skeleton_is_the_base_model(bert: Path) -> None:
    """As AutoModel would build it, but for the pooler."""
    expected = {n for n in AutoModel.from_pretrained(bert).state_dict() if "pooler" not in n}
    assert set(inspect(bert).blueprint.tensors) == expected
