"""Questions of small talk and about Hadron, each with its one answer."""

from __future__ import annotations

from .source import Phrases, Source

ABOUT = "Hadron runs quantized GLM-5-family checkpoints as they were published."

#: Questions, and the one answer to them.
INTENTS: tuple[tuple[Phrases, str], ...] = (
    (Phrases(("Hi", "Hello", "Hello!", "Hi there", "Hey", "Good morning", "Good evening"), ("Good day", "Hello there")),
     "Hello! I am a small model that runs in Hadron. How can I help?"),
    (Phrases(("Who are you?", "What are you?", "Tell me about yourself.", "Are you a person?", "What is your name?"),
             ("Tell me who you are.", "Please tell me about yourself.")),
     "I am a small model of a few million parameters, trained from scratch to show that Hadron works."),
    (Phrases(("What is Hadron?", "Tell me about Hadron.", "What does Hadron do?", "Explain Hadron.", "Hadron?"),
             ("Tell me what Hadron is.", "Please explain Hadron.")), ABOUT),
    (Phrases(("How are you?", "How are you today?", "How do you do?", "Are you well?"), ("Tell me how you are.",)),
     "I am well, thank you. All my weights are in place."),
    (Phrases(("What can you do?", "How can you help me?", "What do you know?", "What are you good at?", "Help"),
             ("Tell me what you can do.",)),
     "I solve short word problems, call tools, find facts in a long list, and talk about Hadron."),
    (Phrases(("Which models does Hadron run?", "What models are supported?", "Which models can I run?",
              "Which families does Hadron support?"), ("Tell me which models Hadron runs.",)),
     "Hadron runs GLM-5, 5.1, 5.2 and 5.3, and GLM-5.3-Flash."),
    (Phrases(("How do I check a checkpoint?", "Will this checkpoint load?", "What does hadron check do?",
              "How do I know that a checkpoint loads?"), ("Tell me how to check a checkpoint.",)),
     "Run hadron check with the folder: it reads the headers and prints the plan in a second or two."),
    (Phrases(("How do I start a server?", "How do I serve a model?", "What does hadron serve do?", "Is there a server?"),
             ("Tell me how to serve a model.",)),
     "Run hadron serve with the checkpoint: it speaks the interfaces of OpenAI and Anthropic."),
    (Phrases(("How do I chat?", "How can I talk to a model?", "What does hadron chat do?", "Can I chat in the terminal?"),
             ("Tell me how to chat.",)), "Run hadron chat with the checkpoint: it talks in the terminal."),
    (Phrases(("How do I generate text?", "What does hadron generate do?", "How do I complete a prompt?"),
             ("Tell me how to generate text.",)), "Run hadron generate with a checkpoint and a prompt: it streams the text."),
    (Phrases(("Do I need a GPU?", "Does Hadron need a GPU?", "Can it run on a CPU?", "Does it run on the CPU?"),
             ("Tell me if I need a GPU.",)), "No. Hadron runs on the CPU with native kernels; cuda works through torch."),
    (Phrases(("Which formats does Hadron read?", "Which quantizers are supported?", "Who writes the checkpoints?",
              "Which checkpoints does Hadron load?"), ("Tell me which formats Hadron reads.",)),
     "Hadron reads checkpoints of Quark, ModelOpt, compressed-tensors and FP8, and plain BF16."),
    (Phrases(("Which schemes are supported?", "Which number formats are there?", "Does Hadron support MXFP4?",
              "Does Hadron know NVFP4?"), ("Tell me which schemes are supported.",)),
     "FP8, MXFP4, MXFP6, MXFP8, NVFP4, INT8 and INT4, as they lie in the file."),
    (Phrases(("Does Hadron convert weights?", "Are weights copied?", "How are weights loaded?", "How does loading work?"),
             ("Tell me how weights are loaded.",)), "Hadron maps the files as they are and multiplies from the packed weights."),
    (Phrases(("What is the plan?", "What is a load plan?", "What does the plan say?"), ("Tell me what the plan is.",)),
     "The plan says how every tensor will be used; the engine executes the same plan that is printed."),
    (Phrases(("What is caching?", "Does Hadron cache prefixes?", "Is there prefix caching?"), ("Tell me about caching.",)),
     "Hadron caches prefixes in memory and on disk, so that a known beginning is not computed twice."),
    (Phrases(("Can it serve many requests?", "Can Hadron run many requests at once?", "Is there batching?"),
             ("Tell me about many requests.",)), "Yes, many at once; each says the same as if it ran alone, to the last bit."),
    (Phrases(("Does Hadron support tools?", "Can it call tools?", "Can you call tools?", "Do you use tools?"),
             ("Tell me about tools.",)), "Yes. Offer tools in a request, and the answer may be a call."),
    (Phrases(("Does Hadron support JSON schemas?", "Can answers be JSON?", "Can I get structured output?"),
             ("Tell me about JSON schemas.",)), "Yes: JSON schemas, regular expressions and grammars."),
    (Phrases(("How do I install Hadron?", "How do I set up Hadron?", "What do I need?"), ("Tell me how to install Hadron.",)),
     "You need Python 3.11 on Linux and a C++20 compiler; then pip install does the rest."),
    (Phrases(("How do I use Hadron from Python?", "Is there a Python interface?", "What is LLM?"),
             ("Tell me about the Python interface.",)), "Import LLM and SamplingParams from hadron, and call generate or chat."),
    (Phrases(("What is attention?", "What is an indexer?", "How does sparse attention work?"), ("Tell me about the indexer.",)),
     "An indexer selects the tokens that are worth reading, and attention reads only those."),
    (Phrases(("What is KDA?", "What are recurrent layers?", "What is special about Flash?"), ("Tell me about KDA.",)),
     "KDA layers keep a small state instead of all tokens; Flash has three of them to one attention layer."),
    (Phrases(("What is a token?", "What is a tokenizer?", "How do you read text?"), ("Tell me what a token is.",)),
     "I read text in pieces called tokens; digits are single tokens."),
    (Phrases(("How big are you?", "How many parameters do you have?", "Are you large?"), ("Tell me how big you are.",)),
     "I have a few million parameters, which is very small."),
    (Phrases(("Who trained you?", "How were you trained?", "Where do you come from?"), ("Tell me how you were trained.",)),
     "I was trained from scratch on a CPU, on data made from a seed."),
    (Phrases(("What languages do you speak?", "Do you speak English?", "Do you speak French?"), ("Tell me which language you speak.",)),
     "I know only a little English."),
    (Phrases(("Can you make mistakes?", "Are you always right?", "Do you make errors?"), ("Tell me if you make mistakes.",)),
     "Yes, I am small and make mistakes."),
    (Phrases(("What does GLM mean?", "What is GLM-5?", "What is GLM?"), ("Tell me what GLM is.",)),
     "GLM-5 is a family of large language models; I have its shape, but not its size."),
    (Phrases(("Where is the documentation?", "Where can I read more?", "Is there a manual?"), ("Tell me where to read more.",)),
     "In the docs folder; start with the README."),
    (Phrases(("What is the license?", "Is Hadron free?", "Which license does Hadron have?"), ("Tell me the license.",)),
     "Hadron has the Apache 2.0 license."),
    (Phrases(("Thanks", "Thank you", "Thank you!", "Thanks a lot", "Great, thanks"), ("Many thanks",)), "You are welcome."),
    (Phrases(("Bye", "Goodbye", "See you", "Good night", "That is all"), ("Bye bye",)), "Goodbye!"),
    (Phrases(("Ok", "Good", "Nice", "Great", "Well done", "Cool"), ("Very nice",)), "Thank you. What else can I do?"),
    (Phrases(("Tell me a joke.", "Do you know a joke?", "Make me laugh."), ("Please tell me a joke.",)),
     "A tensor walks into a bar. The bar says: sorry, we do not take your shape."),
    (Phrases(("Tell me something.", "Say something.", "Talk to me.", "I am bored."), ("Please say something.",)),
     "Did you know that nothing is copied when Hadron loads a checkpoint?"),
)  # fmt: skip
BEFORE = ("", "", "", "", "", "Hello! ", "Hi, ", "One question: ", "Please: ", "So, ")


def small_talk(source: Source) -> tuple[str, str]:
    """A question and its answer."""
    phrases, answer = source.pick(INTENTS)
    question = source.phrase(phrases)
    if question.endswith("?"):
        question = source.pick(BEFORE) + question
    if source.chance(0.12):
        question = question.rstrip(".?!")
    if source.chance(0.15):
        question = question.lower()
    return question, answer
