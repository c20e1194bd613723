"""The protocol as values: bytes in, values out, and back. No sockets, no files, no clocks.

Read in this order: `framing` cuts a byte stream into frames, `command` reads and writes a frame's
header, `headers` and `bodies` give the fields their types, `record` is the stored message.
"""
