"""Running in the foreground (`inferact serve`, `inferact up`): ports, signals, child processes, the demo."""
