r"""LaTeX commands that math-verify is known to interpret correctly.

Math-verify drops unknown commands; for example, `3\phantom{7}` would be read as 3 + 7. Therefore, a
text that contains a command not listed here is not treated as mathematics and stays undecided.
"""

import re

_GREEK = """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi varphi chi psi
    omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
"""
_FUNCTIONS = """
    sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch log ln lg exp sqrt frac dfrac
    tfrac cfrac binom dbinom tbinom max min gcd lcm det
"""
_SIGNS = """
    cdot times div pm mp lt gt le ge ne leq geq neq leqslant geqslant in notin cup cap setminus approx approxeq simeq doteq infty circ
    degree lfloor rfloor lceil rceil lvert rvert vert lbrace rbrace emptyset varnothing mathbb
"""
_CALCULUS = "sum prod int iint iiint oint lim limits to partial nabla prime"
_NAMES = "angle triangle overline bar vec hat tilde overrightarrow widehat mathcal ell hbar"
READ = frozenset(f"{_GREEK} {_FUNCTIONS} {_SIGNS} {_CALCULUS} {_NAMES}".split())
_COMMAND = re.compile(r"\\([A-Za-z]+)")


def are_known(text: str) -> bool:
    """Return True if all LaTeX commands in a text are in READ."""
    return READ.issuperset(_COMMAND.findall(text))
