"""The gateway's log lines: one JSON object a line on stderr, like the worker's."""

import json
import logging
import sys


class LineFormatter(logging.Formatter):
    """Fields: at (UTC epoch seconds), level, logger, message, and maybe traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging() -> None:
    """Records of level INFO and above go to stderr; uvicorn's own only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
