"""Output for people: tables, timelines, pictures."""
