"""The conversations of the demo and of `multi_turn`: six customers of an outdoor shop, four questions each.

All share one long system prompt, as the chats of a support desk do. A chat is kept as **token ids**: the answer goes
into the next prompt as the model produced it, so what is sent next turn begins with exactly what was computed before.
Decoding and tokenising again would change tokens at the seam, and every cache would rightly miss there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

HANDBOOK = """\
You are the support assistant of Fernhill Outdoor, a shop for hiking and camping equipment with a web store and three \
branches. You answer customers in plain, friendly English. Keep answers short: two or three sentences, and name the \
one step the customer should take next. Use only the facts in this handbook. When the handbook does not cover a \
question, say so and offer to pass it to a colleague; never invent a price, a date or a promise.

1. Opening hours and contact
The web store takes orders at all hours. The branches in Millbrook, Castleton and Port Ansel open from Monday to \
Saturday between nine and six, and close on Sundays and public holidays. The telephone line is staffed on weekdays \
from eight to five. E-mail is answered within one working day, and within four hours when the subject line contains \
an order number. Customers who are already on a trip should call rather than write.

2. Orders and payment
We accept cards, bank transfer and gift cards; two means of payment can be combined in one order. An order can be \
changed or cancelled without a reason until the parcel leaves the warehouse, which is usually at three in the \
afternoon on the next working day. Prices include tax. A voucher code must be entered before payment, because it \
cannot be added to an order that is already paid. Business customers receive an invoice and may pay within thirty days.

3. Shipping
Standard shipping takes three to five working days and costs six dollars; it is free for orders above eighty dollars. \
Express shipping takes one working day if the order arrives before noon, and costs fifteen dollars. Tents, sledges and \
canoe paddles longer than one metre and a half travel with a freight carrier, who calls the customer to agree on a \
day. Gas cartridges and other pressurised goods are never shipped by air, so islands receive them by ferry, which \
adds about four days. A tracking number is sent by e-mail as soon as the parcel is scanned for the first time.

4. Returns and exchanges
Goods can be returned within sixty days if they are clean and have not been used outdoors. Trying boots on at home, \
on a carpet, is welcome; mud on the sole means that the boots have been used. The return label is in the parcel, and \
returns to a branch are free. Refunds go to the original means of payment within five working days after the parcel \
has arrived. Climbing ropes, harnesses, helmets and avalanche equipment cannot be returned once their seal is broken, \
because we could not sell them to anyone else with a clear conscience. An exchange for another size is shipped at \
once, before the first item has come back. Sale items can be exchanged but not refunded, and the label says so.

5. Warranty and repairs
Every product has a warranty of three years against faults in material and workmanship; backpacks and tents of our own \
brand have ten years. The warranty does not cover wear, burns, or damage by washing against the instructions. Our \
workshop in Castleton repairs zips, seams, poles, stoves and boot soles. A repair takes about two weeks; a zip costs \
twenty-five dollars, a new pole section twelve, a pair of soles seventy. Customers receive an estimate first, and \
nothing is repaired without their consent. Items must be clean and dry when they arrive.

6. Tents
A tent should be pitched once at home before the first trip. Seams of our own brand are sealed in the factory; other \
brands may need a tube of seam sealer. Condensation on the inside is normal on cold, still nights and is not a leak: \
open both vents and keep the tent away from low ground beside water. Never store a tent wet for more than a day, since \
mildew destroys the coating, and no repair brings it back. Use the footprint on stony ground. In strong wind, pitch \
the narrow end into the wind and use all guy lines.

7. Sleeping bags and mats
The comfort figure on the label is the temperature at which a person who feels the cold sleeps well; the limit figure \
is for people who do not. Advise a bag whose comfort figure is five degrees below the coldest night expected. Down \
is lighter and packs smaller, synthetic filling still warms when damp and costs less. Wash down with down soap at \
thirty degrees and dry it in a tumbler at low heat with two tennis balls. Store bags loose, never in the small sack. \
A mat matters as much as the bag: on frozen ground its insulation value should be four or more.

8. Stoves and fuel
Gas stoves are the easiest to use but weaken below freezing; liquid fuel works at any temperature and needs practice. \
Stoves must never be used inside a closed tent, because of fire and because of carbon monoxide, which has no smell. \
One large gas cartridge boils about twenty-four litres of water in summer. Empty cartridges can be handed in at every \
branch. If a customer smells gas, they should close the valve, move away from flames and call us; do not suggest \
repairs in such a case.

9. Boots
Boots should be tried on in the afternoon with the socks that will be worn, and should leave a thumb's width before \
the toes. Leather boots need about thirty kilometres of easy walking before a long trip. After rain, dry them at room \
temperature with paper inside, never at a fire or a heater, then wax leather or spray fabric. Membranes keep water out \
and slow drying down; for hot and dry regions a boot without a membrane is the better choice.

10. Rental and membership
Tents, snowshoes, bear canisters and avalanche sets can be rented at the branches by the day; a week costs as much as \
four days. A deposit is returned when the equipment comes back clean. Members of the Fernhill Club pay twenty dollars \
a year and receive ten percent off full-price goods, free repairs of zips, and one rental day each season. The \
discount cannot be combined with a voucher. Membership ends by itself after a year unless the customer renews it.

11. Backpacks and water
A backpack must fit the length of the back, not the height of the body: measure from the bony bump at the neck to the \
top of the hips, or ask for a fitting at a branch. The hip belt should carry most of the weight. A day trip needs \
twenty to thirty litres, a weekend forty to fifty, a longer trek sixty or more. No backpack is fully waterproof, so \
recommend a liner. Water filters stop bacteria but not viruses; where viruses are likely, boil the water or use \
tablets as well. A filter that has frozen once must be replaced, even when it looks unharmed.

12. Privacy and complaints
Never ask for a full card number or a password. Addresses and orders may be discussed only after the customer has \
given the order number and the postal code; delete what a customer sends by mistake. Angry customers are first thanked \
for saying what went wrong. A complaint that you cannot solve in two answers goes to a colleague, with a summary, so \
that nobody has to tell the story twice.
"""

SISTER_SHOPS = ("Fernhill", "Larkmoor", "Tarnbrook")


def handbook(shop: str) -> str:
    """Query. The same rules under another name, which is the ninth token: hardly anything of a prompt is shared."""
    return HANDBOOK.replace(SISTER_SHOPS[0], shop)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One customer: what they want, and their questions, turn by turn."""

    name: str
    questions: tuple[str, ...]


CONVERSATIONS = (
    Conversation(
        "wet tent",
        (
            "Hello! I slept in my new tent last weekend and the inside was wet in the morning. Is it leaking?",
            "It was a cold night beside a lake. What should I do differently next time?",
            "I packed it away wet and it has been in the car for three days. Is that a problem?",
            "One pole is bent as well. Can you repair it, and what does it cost?",
        ),
    ),
    Conversation(
        "boots",
        (
            "I ordered boots last month and they feel too tight. Can I still exchange them?",
            "I only wore them in the living room. Do I have to send them back first?",
            "How should a boot fit, so that I choose the right size this time?",
            "They are leather. How do I get them ready for a two week trek?",
        ),
    ),
    Conversation(
        "sleeping bag",
        (
            "Which sleeping bag do you recommend for nights around freezing? I am always cold.",
            "Should I take down or synthetic? It may rain a lot where I go.",
            "How do I wash it after the trip?",
            "Do I need a special mat if the ground is frozen?",
        ),
    ),
    Conversation(
        "island order",
        (
            "I live on an island and want to order a stove and three gas cartridges. How long does it take?",
            "How much is shipping if the whole order is ninety dollars?",
            "How many cartridges do I need to boil two litres a day for a month in summer?",
            "What do I do with the empty ones?",
        ),
    ),
    Conversation(
        "late change",
        (
            "I placed an order this morning and forgot my voucher code. Can you add it?",
            "Then I would like to cancel it and order again. Is it too late?",
            "When will I get my money back? I paid half of it with a gift card.",
            "I need the new order by tomorrow evening. Is there a way?",
        ),
    ),
    Conversation(
        "winter trip",
        (
            "We plan a winter weekend with four friends. Can we rent snowshoes and avalanche sets?",
            "What does a whole week cost compared with single days?",
            "Is the club membership worth it for us?",
            "Can we cook inside the tent if the weather is bad?",
        ),
    ),
)

LATER_QUESTIONS = (
    "Thank you! Which of your branches is open on Saturday?",
    "What should I bring when I come to the shop?",
    "Can the soles be replaced when they are worn?",
    "How long does such a repair take?",
    "Do I get an estimate before you start?",
    "Good. What is the telephone number for?",
)  # for any conversation that goes on after its script


def interleaved(conversations: Sequence[Conversation]) -> Iterator[tuple[int, int]]:
    """Query. (conversation, turn) as a busy desk sees them: everybody's first question, then the second ones."""
    for turn in range(max(len(each.questions) for each in conversations)):
        for index, each in enumerate(conversations):
            if turn < len(each.questions):
                yield index, turn


ANSWER = "\N{ASTERISM}"  # stands for an answer while a template is rendered; the texts above do not use it


class Chat:
    """One conversation as token ids. `ask` gives the next prompt, `answered` records what the model made of it."""

    def __init__(self, tokenizer: Any, system_prompt: str = HANDBOOK) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._token_ids: list[int] = []

    def ask(self, question: str) -> list[int]:
        """Query. The whole prompt: all that was said before, the question, and the opening of an answer."""
        if not self._token_ids:
            return self._tokens(self._render(question, answer=None))
        after_answer = self._render(question, answer=ANSWER).partition(ANSWER)[2]
        return self._token_ids + self._tokens(self._without_spoken_end(after_answer))

    def answered(self, token_ids: Sequence[int]) -> None:
        """Changes state. `token_ids`: prompt and answer, as `generate` returns them."""
        self._token_ids = list(token_ids)

    def _render(self, question: str, *, answer: str | None) -> str:
        """The template's text: of a first turn, or of a turn after an answer."""
        messages = [{"role": "system", "content": self._system_prompt}]
        if answer is not None:
            messages += [{"role": "user", "content": "."}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": question})
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _without_spoken_end(self, after_answer: str) -> str:
        """The end-of-turn token is the template's job, except where the model has said it itself."""
        end = self._tokenizer.eos_token
        return after_answer.removeprefix(end) if self._token_ids[-1] == self._tokenizer.eos_token_id else after_answer

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
