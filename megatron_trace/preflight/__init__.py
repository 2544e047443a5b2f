"""What is checked before a model is trained with records."""
