"""How models write tool calls, and what is common to their formats. Stages 2 and 9.

output_parser   the seam: text in, events out; what a model tells itself first is split off
formats         the formats by name, and which of them a model's template was written for
envelope        the constraint that makes a model call, or keeps the calls it makes well-formed
cursor          the base of all parsers: text that arrives in pieces, read as if it were all there
json_call       objects that name a call, read from such text
json_formats, pythonic: the parsers
"""

__all__ = ["output_parser"]
