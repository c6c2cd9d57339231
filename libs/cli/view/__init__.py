"""The output of commands: tables, reports, phases and tokens in words."""
