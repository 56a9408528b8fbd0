"""What a call is made of: memory layouts, masks, tensors, and the checks that they fit each other."""
