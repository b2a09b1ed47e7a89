"""Is a new model's text work done within its limits? Asked once, before the model is ready.

A chat template or a tokenizer that takes too much for ordinary texts would be ended at every
tenant's request (gateway/text/prepare_process.py). So registration has the same processes read the
pack's small files and prepare texts that are short, long, of one letter, of one blank, of many
scripts. None of these may need a token that the model's embedding has no row for. What only some
word of a tenant sets off is not found here; the gateways end or refuse it then.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from gateway.settings.settings import Settings
from gateway.text.codecs import prompt_ids
from gateway.text.pieces import PieceTable
from gateway.text.prepare_messages import (
    EncodeChat,
    EncodePrompt,
    EncodeTexts,
    Failed,
    Ids,
    Inputs,
    Job,
    LoadEncoder,
    LoadText,
    Reply,
    TextFacts,
)
from gateway.text.prepare_pool import PreparePool, PrepareSpent

CODE = "unusable_text_files"
_TEXTS = (
    "Hello",
    "a" * 4000,
    " " * 4000,
    "1" * 2000,
    "\n" * 2000,
    "The game is afoot, 3.14! " * 200,
    "naïve café 日本語 текст \U0001f600 e\u0301" * 50,
)


def check_text_files(
    pack: Path, task: str, max_context: int, vocab_size: int, settings: Settings
) -> str:
    """Why the model must not be served; "" where it may. Blocks for some tenths of a second.

    Not to be called where an event loop runs.
    """
    if not (pack / "tokenizer.json").is_file():
        return ""  # whoever made the pack has seen to that
    return asyncio.run(_check(str(pack), task, max_context, vocab_size, settings))


async def _check(
    folder: str, task: str, max_context: int, vocab_size: int, settings: Settings
) -> str:
    pool = PreparePool.of(settings, num_processes=1)
    try:
        for job in _jobs(folder, task == "generate", max_context):
            reply = await pool.ask(job)
            if isinstance(reply, Failed) and reply.kind == "files":
                return f"its tokenizer or chat template cannot be used: {reply.message}"
            if isinstance(reply, TextFacts):
                PieceTable(reply.pieces)
            last = _last_id(reply)
            if last >= vocab_size:
                return (
                    f"its tokenizer makes the token {last} of ordinary texts, but the model's "
                    f"embedding has only {vocab_size} rows: resize the embedding, or use the "
                    "tokenizer that the model was trained with"
                )
    except PrepareSpent as error:
        return (
            f"its tokenizer or chat template takes {error}: the files are damaged or hostile; use "
            "another revision of the model"
        )
    except ValueError as error:
        return f"its tokenizer cannot be used: {error}"
    finally:
        pool.close()
    return ""


def _last_id(reply: Reply) -> int:
    """The highest token id in it, -1 where there is none."""
    if isinstance(reply, Ids):
        return max(prompt_ids(reply), default=-1)
    inputs = reply.inputs if isinstance(reply, Inputs) else []
    return max((max(item.ids, default=-1) for item in inputs), default=-1)


def _jobs(folder: str, is_text: bool, most: int) -> Iterator[Job]:
    if not is_text:
        yield LoadEncoder(folder)
        yield EncodeTexts(folder, list(_TEXTS), most, cut=True)
        return
    yield LoadText(folder)
    for text in _TEXTS:
        yield EncodePrompt(folder, text, most)
        yield EncodeChat(folder, [{"role": "user", "content": text}], (), True, False, most)
