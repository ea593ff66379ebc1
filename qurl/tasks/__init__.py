"""Problems with gold answers, their prompts and rewards."""
