"""Readers and writers of files (JSON, YAML, text), file locks and message formatting.

Readers take nothing for granted: a file yields plain data, or one sentence that names the file, the
line and the field. Writers leave a whole file or none.
"""
