"""From a method's inputs to its outputs: checked, bound to addresses, captured, run, handed out."""
