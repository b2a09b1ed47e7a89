"""The gateway's log lines: one JSON object a line on stderr, like the worker's."""

import json
import logging
import sys


class LineFormatter(logging.Formatter):
    """Fields: at (UTC epoch seconds), level, logger, message, and maybe traceback; `process` where
    a server has several."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            line["process"] = self._process
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(process: str = "") -> None:
    """Records of level INFO and above go to stderr. Of uvicorn's own only errors: it
    warns of each request that is no HTTP, and anybody could fill a disk with those."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
