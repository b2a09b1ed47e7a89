"""How models write tool calls: one format a file, and what is common to them. Stages 2 and 9.

formats     the formats by name, and which of them a model's template was written for
envelope    the constraint that makes a model call, or keeps the calls it makes well-formed
cursor      the base of all parsers: text that arrives in pieces, read as if it were all there
json_call   objects that name a call, read from such text; python_text: literals of Python
hermes, llama_json, mistral, pythonic: the parsers
"""
