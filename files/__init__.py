"""Everything the application reads from outside and writes, in one place for each kind.

Readers take nothing for granted: whatever is in a file ends in plain data or in one sentence that
names the file, the line and the field. Writers leave a whole file or none.
"""
