"""Learning signals: advantage estimators, and further inputs of the loss such as a teacher. Pure, without torch."""
