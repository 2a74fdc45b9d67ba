// The phases of a micro-batch in a partition.

export const PHASES = ["forward", "recompute", "backward", "weight"];
export const LETTERS = ["F", "R", "B", "W"];
export const RECOMPUTE = 1;
export const BACKWARD = 2;
