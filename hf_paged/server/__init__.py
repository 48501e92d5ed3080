"""An OpenAI-style HTTP interface over the public API: `hf_paged.server.create_app(model, tokenizer)`."""

from hf_paged import needs

with needs("hf-paged[server]"):
    from hf_paged.server.app import create_app
    from hf_paged.server.heads import limited_protocol
    from hf_paged.server.requests import RequestTable, ServedRequest
    from hf_paged.server.settings import ServerSettings

__all__ = ["RequestTable", "ServedRequest", "ServerSettings", "create_app", "limited_protocol"]
