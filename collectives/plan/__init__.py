"""From a request to closures that move bytes: the choice of algorithm and transport, layouts, the program, its binding,
its execution."""
