"""Where processes meet that nothing connects yet: stores of keys and values, ours, torch's or the program's."""
