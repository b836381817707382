"""From a trace to a time line: devices, operations, collectives, streams."""
