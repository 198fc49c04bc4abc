"""`plancast::PagedAttention`: names that everything else agrees on. Schema and reference live here."""
DOMAIN = "plancast"
OP_TYPE = "PagedAttention"
VERSION = 1
INPUTS = ("query", "key", "value", "key_cache", "value_cache", "past_lens", "query_starts", "block_ids",
          "block_starts", "max_context_len", "sinks", "alibi_slopes")
OUTPUTS = ("attention",)
