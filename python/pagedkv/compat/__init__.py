"""Other projects' names for what is here."""
