"""For the tests of code that emits: an outbox that keeps events in a list, and real servers as pytest fixtures.

The fixtures are in `outbox_plugin.testing.fixtures`.
"""

from outbox_plugin.testing.recording_outbox import RecordingOutbox

__all__ = ["RecordingOutbox"]
