"""The devplan command: parse, print, choose the exit code; compute nothing."""
