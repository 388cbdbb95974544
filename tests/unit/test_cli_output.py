import pytest

from gemm_tuner.cli.output import print_line, print_message


def test_control_characters_of_others_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    brand = "AMD\x1b]0;owned\x07\x1b[2J\x9b1mEPYC\r"

    print_line(f"{brand}\n\tnext µ")
    print_message(brand)

    spelled = r"AMD\x1b]0;owned\x07\x1b[2J\x9b1mEPYC\x0d"
    captured = capsys.readouterr()
    assert captured.out.startswith(spelled)
    assert captured.err == f"{spelled}\n"
    assert not any(ord(one) < 32 and one not in "\n\t" for one in captured.out)
