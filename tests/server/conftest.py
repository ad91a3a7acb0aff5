"""Fixtures that the tests of the server share."""

from tests.server.running import http, scripts, server  # noqa: F401
