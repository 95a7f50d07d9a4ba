"""Training on conversations, preferences and rewards, by trl's trainers."""
