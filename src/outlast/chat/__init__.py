"""A conversation with a served model: the client side of `outlast chat`, usable without a terminal.

`client` speaks HTTP, `conversation` and `exchange` hold what was said, `own_server` starts a server, `terminal` and
`plain` are the two faces of the command.
"""
