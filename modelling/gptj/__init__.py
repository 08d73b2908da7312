"""GPT-J: a decoder with rotary positions, and attention and feed-forward side by side."""
