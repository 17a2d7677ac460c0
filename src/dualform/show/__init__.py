"""Show answers to people: tables, drawings in the terminal, figures, the command line."""
