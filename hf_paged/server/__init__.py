"""An OpenAI-style HTTP interface over the public API: `hf_paged.server.create_app(model, tokenizer)`."""

from hf_paged.server.app import create_app
from hf_paged.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
