"""Everything the application reads from outside and writes, in one place for each kind.

Readers take nothing for granted: a file yields plain data, or one sentence that names the file, the
line and the field. Writers leave a whole file or none.
"""
