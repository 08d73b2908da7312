"""Llama and its relatives (Mistral, Qwen, Gemma, Phi, OLMo, gpt-oss, ...) as one family."""
