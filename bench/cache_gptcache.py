"""GPTCache on a stream, for `bench.cache`: `PYTHON cache_gptcache.py STREAM.npz SEED...`.

Runs in an environment of its own (`pip install gptcache faiss-cpu numpy sqlalchemy`) and imports
nothing of this project. The pipeline is what its `init_similar_cache` builds by default: SQLite and
Faiss, the distance as evaluation, a threshold of 0.8; only the embedding model, which it would
download, is the one that all rows of the comparison use. Its other default, the evaluation of
`gptcache.adapter.openai`'s examples by a downloaded ONNX model, is not here. Also with the
threshold at which its distance says cosine 0.95. Prints counts as JSON.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gptcache import Cache, Config
from gptcache.adapter.api import get, put
from gptcache.manager import CacheBase, VectorBase, get_data_manager
from gptcache.processor.pre import get_prompt
from gptcache.similarity_evaluation import SearchDistanceEvaluation

# Its score is 4 less the squared distance, which is 2 - 2 cos; the threshold is a share of 4.
THRESHOLDS = {"default (0.8)": 0.8, "cosine 0.95": (4 - (2 - 2 * 0.95)) / 4}


def run(
    texts: list[str], answers: Any, vectors: Any, seed: int, threshold: float
) -> dict[str, int]:
    """One pass over the stream in the seed's order."""
    where = {text: i for i, text in enumerate(texts)}
    right = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache()
        cache.init(
            pre_embedding_func=get_prompt,
            embedding_func=lambda text, **_: vectors[where[text]],
            data_manager=get_data_manager(
                CacheBase("sqlite", sql_url=f"sqlite:///{folder}/cache.db"),
                VectorBase(
                    "faiss", dimension=vectors.shape[1], index_path=str(Path(folder) / "faiss")
                ),
            ),
            similarity_evaluation=SearchDistanceEvaluation(),
            config=Config(similarity_threshold=threshold),
        )
        for i in np.random.default_rng(seed).permutation(len(texts)).tolist():
            said = get(texts[i], cache_obj=cache)
            if said is None:
                put(texts[i], str(answers[i]), cache_obj=cache)
            else:
                right += said == str(answers[i])
                wrong += said != str(answers[i])
    return {"num_requests": len(texts), "num_right": right, "num_wrong": wrong}


def main() -> None:
    """Each threshold over each seed."""
    with np.load(sys.argv[1]) as loaded:
        texts, answers, vectors = loaded["texts"].tolist(), loaded["answers"], loaded["vectors"]
    seeds = [int(seed) for seed in sys.argv[2:]]
    print(
        json.dumps(
            {
                name: [run(texts, answers, vectors, seed, threshold) for seed in seeds]
                for name, threshold in THRESHOLDS.items()
            }
        )
    )


if __name__ == "__main__":
    main()
