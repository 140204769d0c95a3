"""Does a training loop take the step that it says it takes?"""
