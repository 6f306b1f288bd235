"""What every other module may use: errors, settings, messages, element types, what launchers say in the environment.
Imports nothing above."""
