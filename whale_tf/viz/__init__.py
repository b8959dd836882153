"""What people look at: tables, timelines, pictures."""
