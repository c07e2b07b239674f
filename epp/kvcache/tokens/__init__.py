"""Token ids of prompts: the very ids the worker computes, at the price of what is new in them. See `tokens.Tokens`."""

from epp.kvcache.tokens.folder import ModelFolderError
from epp.kvcache.tokens.tokens import Tokenized, Tokens

__all__ = ["ModelFolderError", "Tokenized", "Tokens"]
