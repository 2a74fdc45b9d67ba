"""What `pipesight demo` trains, and how it shows it: a small GPT that learns Shakespeare's sonnets by the letter."""
