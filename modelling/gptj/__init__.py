"""GPT-J: a decoder with RoPE, and attention and feed-forward in parallel."""
