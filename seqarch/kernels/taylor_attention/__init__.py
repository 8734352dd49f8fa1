"""Based's linear attention: the exponential of softmax attention replaced by its second-order Taylor expansion."""
