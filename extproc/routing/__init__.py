"""The brain: which node takes a request, and when. No I/O, and no clock but the one handed in."""
