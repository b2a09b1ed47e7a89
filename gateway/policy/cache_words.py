"""Short word lists that stage 4's guards read (data only; cache_reading.py reads them).

Own lists: English first, then what German, French, Spanish, Italian, Portuguese, Dutch and Russian
need for negation, numbers, months and weekdays, opposites and question words. A word that is not
here is an ordinary word: it still counts where two questions do not share it. Everything is lower
case; words of a string are parted by blanks.
"""

FUNCTION_WORDS = {
    "en": """the a an of to is are was were do does did how what which who when where why can could
        my i you it in on for with and this that have has be from me your at if""",
    "de": """der die das den dem ein eine einen ist sind war wie was wer wo wann warum ich du mein
        meine kann für mit und auf zu nicht man es im am wird hat""",
    "fr": """le la les un une des du est sont était comment que quel quelle qui où quand pourquoi je
        mon ma puis pour avec et dans ce cette pas ne on il elle aux au peut faire""",
    "es": """el la los las un una del es son era cómo qué cuál quién dónde cuándo cuánto cuánta
        cuántos mi yo puedo para con y en este esta no por se al lo está ¿""",
    "it": """il lo la gli le un una del della è sono era come che cosa quale chi dove quando perché
        mio mia posso per con e nel questo non di si faccio""",
    "pt": """o a os as um uma do da é são era como que qual quem onde quando quanto meu minha posso
        para com e no na este não por ao está faço""",
    "nl": """de het een is zijn was hoe wat wie waar wanneer waarom ik je mijn kan voor met en op
        niet te van dit dat naar""",
}

# What carries no subject of its own; two questions may differ in these.
FILLERS = """
a an the of to in on at by for with from and or so as is are was were be been being am do does did
doing done have has had having will would shall should can could may might must i me my mine we us
our you your he him his she her it its they them their this that these those there here what which
who whom whose when where why how 's 're 've 'd 'll 'm just also very really please some any all
about into out up down get got getting go going tell explain describe define mean means meaning
know want need like give show say let best good way ways possible one ones someone anyone people
person thing things something anything much many able help make makes making work works working
use using used question answer hello hi hey thanks thank actually exactly currently ever now still
if then than but too over off such own same other another kind sort type does take takes become
try trying trouble wondering wonder reason reasons main
der die das den dem des ein eine einen einem einer ist sind war wie was wer wo wann warum ich du
mein meine kann für mit und auf zu man es im am hat zum zur von nach bitte
le la les un une des du de est sont comment que quel quelle qui où quand pourquoi je mon ma puis
pour avec et dans ce cette on il elle aux au à en que est-ce peut
el los las del es son cómo qué cuál quién dónde cuándo mi yo puedo con y este esta por se al lo
il lo gli è sono come che cosa quale chi dove quando perché mio mia posso per nel di si da
o os as um uma do da é são qual quem onde meu minha para com no na ao
het een zijn hoe wat wie waar wanneer waarom ik je mijn voor op te van dit dat naar
"""

# Of the fillers, those that may be what a question turns on. No difference by themselves; but where
# one text alone has them, the two do not have the same content.
LIGHT = """
another other same own such trouble used use using take takes taking become up down out off over
person people someone anyone something anything thing things working works work
"""
# Who speaks to whom, and no part of what is asked: patterns, one a line.
ADDRESS = """
(?:can|could|will|would) you (?:please )?(?:tell|show|explain|help|give|let|teach)(?: me| us)?
do you know
(?:tell|show|give|let|help|teach) (?:me|us)
(?:i|we) (?:want|need|would like|wish) (?:for )?you to
"""

NEGATIONS = """
not no never none nothing nobody nowhere neither nor without cannot cant dont doesnt didnt isnt
arent wasnt werent wont wouldnt shouldnt couldnt hasnt havent hadnt unable lack lacks lacking
except
nicht kein keine keinen keinem keiner nie niemals nichts niemand ohne
pas jamais rien aucun aucune sans
nunca nada nadie ningún ninguna sin jamás
non mai niente nessuno senza
não nem ninguém sem
niet geen nooit niemand zonder
не нет никогда ничего без нельзя
"""
NEGATED_TAIL = "n't"
NEGATING_PREFIXES = ("un", "in", "im", "il", "ir", "dis", "non", "non-", "mis", "anti", "anti-")

NUMBERS = {
    "zero": 0, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14,
    "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20,
    "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80,
    "ninety": 90, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9,
    "dozen": 12, "half": 0.5, "quarter": 0.25, "twice": 2, "double": 2, "triple": 3,
    "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "thirteenth": 13, "both": 2,
    "zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "sieben": 7, "acht": 8, "neun": 9,
    "zehn": 10, "elf": 11, "zwölf": 12, "zwanzig": 20, "dreißig": 30, "hundert": 100,
    "tausend": 1000,
    "deux": 2, "trois": 3, "quatre": 4, "cinq": 5, "sept": 7, "huit": 8, "neuf": 9, "dix": 10,
    "onze": 11, "douze": 12, "vingt": 20, "trente": 30, "cent": 100, "mille": 1000,
    "dos": 2, "tres": 3, "cuatro": 4, "cinco": 5, "seis": 6, "siete": 7, "ocho": 8, "nueve": 9,
    "diez": 10, "once": 11, "doce": 12, "veinte": 20, "treinta": 30, "cien": 100, "mil": 1000,
    "due": 2, "tre": 3, "quattro": 4, "cinque": 5, "sei": 6, "otto": 8, "nove": 9, "dieci": 10,
    "dois": 2, "duas": 2, "três": 3, "quatro": 4, "sete": 7, "oito": 8, "dez": 10,
    "twee": 2, "drie": 3, "vijf": 5, "zes": 6, "zeven": 7, "negen": 9, "tien": 10,
    "два": 2, "две": 2, "три": 3, "четыре": 4, "пять": 5, "шесть": 6, "семь": 7, "восемь": 8,
    "девять": 9, "десять": 10,
}  # fmt: skip
# Of these lists, words that mean something else where another language is spoken.
NUMBERS_ONLY_IN = {
    "once": "es", "due": "it", "sei": "it", "dix": "fr", "elf": "de", "cent": "fr",
    "mil": "es", "acht": "de", "tre": "it", "sete": "pt", "mille": "fr", "tien": "nl",
}  # fmt: skip
NEGATIONS_ONLY_IN = {
    "pas": "fr", "mai": "it", "non": "it", "sin": "es", "nem": "pt", "sem": "pt", "nie": "de",
    "nada": "es",
}  # fmt: skip

# One line, one meaning; what stands on two lines differs.
DATES = """
january jan januar janvier enero gennaio janeiro januari январь
february feb februar février febrero febbraio fevereiro februari февраль
march mar märz mars marzo março maart март
april apr avril abril aprile апрель
may mai mayo maggio maio mei май
june jun juni juin junio giugno junho июнь
july jul juli juillet julio luglio julho июль
august aug août agosto augustus август
september sep sept septembre septiembre settembre setembro сентябрь
october oct oktober octobre octubre ottobre outubro октябрь
november nov novembre noviembre novembro ноябрь
december dec dezember décembre diciembre dicembre dezembro декабрь
monday mon montag lundi lunes lunedì segunda-feira maandag понедельник
tuesday tue dienstag mardi martes martedì dinsdag вторник
wednesday wed mittwoch mercredi miércoles mercoledì woensdag среда
thursday thu donnerstag jeudi jueves giovedì donderdag четверг
friday fri freitag vendredi viernes venerdì vrijdag пятница
saturday sat samstag samedi sábado sabato zaterdag суббота
sunday sun sonntag dimanche domingo domenica zondag воскресенье
today heute aujourd'hui hoy oggi hoje vandaag сегодня
tomorrow morgen demain mañana domani amanhã завтра
yesterday gestern hier ayer ieri ontem gisteren вчера
tonight
weekend
christmas weihnachten noël navidad natale natal
easter ostern pâques pascua pasqua páscoa
halloween
thanksgiving
spring frühling printemps primavera
summer sommer été verano estate verão zomer лето
autumn herbst automne otoño autunno outono herfst осень
winter hiver invierno inverno inverno зима
am a.m
pm p.m
morning
afternoon
evening
noon midday
midnight
"""
# Ordinary words too: dates only with a capital letter or after "in", "on", "im", "en".
DOUBTFUL_DATES = "may mar mai march sun mon sat wed sept hier été jan spring estate am mei"
TIME_WORDS = "last next previous this coming past letztes letzten nächstes nächsten"
TIME_SPANS = "year month week night weekend day century decade jahr monat woche"

UNITS = """
mg milligram milligrams milligramm
g gram grams gramm gramme grammes gramo gramos
kg kilo kilos kilogram kilograms kilogramm
lb lbs
pound pounds
oz ounce ounces
ton tons tonne tonnes
stone
mm millimetre millimetres millimeter millimeters
cm centimetre centimetres centimeter centimeters
m metre metres meter meters mètres metros
km kilometre kilometres kilometer kilometers kilomètres kilómetros
inch inches
foot feet ft
yard yards
mile miles
acre acres
hectare hectares
ml millilitre millilitres milliliter milliliters
l litre litres liter liters litros
gallon gallons
pint pints
cup cups
tablespoon tablespoons tbsp
teaspoon teaspoons tsp
celsius °c centigrade
fahrenheit °f
kelvin
mph
km/h kph kmh
kb kilobyte kilobytes
mb megabyte megabytes
gb gigabyte gigabytes
tb terabyte terabytes
bit bits
byte bytes
w watt watts
kw kilowatt kilowatts
kwh
v volt volts
hz hertz
khz
mhz
ghz
second seconds sec secs
minute minutes min mins minuten
hour hours hr hrs hourly stunde stunden heures horas
day days daily tag tage tagen jours días
week weeks weekly woche wochen semaines semanas
month months monthly monat monate monaten mois meses
year years yearly annual annually jahr jahre jahren ans años
decade decades
century centuries
usd $ dollar dollars
eur € euro euros
gbp £ quid
jpy ¥ yen
inr ₹ rupee rupees
chf
krone kronor kroner
bitcoin btc
percent % pct per-cent prozent
calorie calories kcal
joule joules
"""

# Pairs, both ways. Stems and inflected forms alike are looked up.
OPPOSITES = """
before after; prior after; increase decrease; increase reduce; increase lower; raise lower;
raise reduce; rise fall; rising falling; rose fell; higher lower; high low; highest lowest;
maximum minimum; max min; maximize minimize; maximise minimise; ascending descending;
enable disable; activate deactivate; open close; opening closing; advantage disadvantage;
benefit drawback; benefit risk; advantage risk; pro con; best worst; better worse; good bad;
lose gain; losing gaining; lost found; buy sell; buy rent; buying selling; buying renting;
encrypt decrypt; encode decode; compress decompress; left right; upload download; lend borrow;
first last; start end; start stop; start finish; begin end; begin finish; lock unlock;
install uninstall; add remove; add delete; create delete; insert delete; attach detach;
men women; man woman; male female; boy girl; boys girls; mother father; mom dad; mum dad; son
daughter; brother sister; husband wife; uncle aunt; king queen; boyfriend girlfriend; him her;
his her; he she; true false; hot cold; warm cool; heat cool; cause effect; cause prevent;
cause cure; cause treat; import export; input output; log-in log-out; login logout; on off;
in out; for against; over under; above below; up down; push pull; send receive; sender receiver;
sender recipient; buyer seller; employer employee; teacher student; doctor patient; parent child;
landlord tenant; winner loser; win lose; winning losing; accept reject; accept refuse;
accept decline; allow forbid; allow block; allow deny; approve reject; grant revoke; include
exclude; inside outside; internal external; indoor outdoor; indoors outdoors; long short; longest
shortest; longer shorter; big small; large small; larger smaller; biggest smallest; largest
smallest; tall short; tallest shortest; fast slow; faster slower; fastest slowest; early late;
earlier later; earliest latest; old new; old young; older younger; oldest youngest; oldest newest;
more less; more fewer; most least; cheap expensive; cheapest expensive; rich poor; hard easy;
difficult easy; strong weak; strength weakness; light dark; light heavy; thick thin; wide narrow;
deep shallow; full empty; dry wet; clean dirty; safe dangerous; healthy unhealthy; public private;
online offline; live die; alive dead; life death; birth death; born died; love hate; marry divorce;
positive negative; plus minus; multiply divide; addition subtraction; sum difference; profit loss;
arrive depart; arrival departure; arrive leave; enter leave; enter exit; entry exit; north south;
east west; northern southern; eastern western; deposit withdraw; deposit withdrawal; credit debit;
save spend; hire fire; connect disconnect; mount unmount; freeze unfreeze; freeze thaw; block
unblock; follow unfollow; subscribe unsubscribe; show hide; visible hidden; wake sleep; sit stand;
front back; top bottom; upper lower; upstream downstream; parallel serial; synchronous asynchronous;
mutable immutable; static dynamic; odd even; prefix suffix; horizontal vertical; active passive;
acquire divest; agree disagree; appear disappear; ally enemy; friend enemy; victory defeat;
success failure; succeed fail; attack defend; war peace; question answer; ask answer; past future;
cure cause; treat cause; expand shrink; expand contract; grow shrink; inhale exhale; import export;
debit credit; tighten loosen; undo redo; pause resume; domestic international; urban rural;
ein aus; einschalten ausschalten; größte kleinste; höchste niedrigste; vor nach; öffnen schließen;
erste letzte; kaufen verkaufen; kaufen mieten; beste schlechteste; mehr weniger; teuer billig;
antes después; abrir cerrar; mayor menor; comprar vender; primero último; mejor peor; subir bajar;
avant après; ouvrir fermer; acheter vendre; premier dernier; plus moins; meilleur pire;
prima dopo; aprire chiudere; comprare vendere; primo ultimo; migliore peggiore; antes depois;
fechar abrir; купить продать; открыть закрыть; больше меньше; включить выключить
"""

# One line, one meaning.
SYNONYMS = """
benefit benefits advantage advantages pro pros merit merits upside
disadvantage disadvantages drawback drawbacks con cons downside
increase increasing raise raising
decrease reduce lower lowering reducing
fast quick faster quicker fastest quickest
buy purchase buying purchasing purchased bought
movie film
begin start beginning starting
stop quit stopping quitting
job career employment
car automobile
phone cellphone smartphone mobile
picture photo image photograph
illness disease sickness
error mistake
company firm
learn study learning studying
improve enhance improving better
delete remove erase
fix repair solve fixing
answer reply
kid child children kids
tv television
usa us america
uk britain
tyre tire
summarise summarize summary
capital capital
invent inventor invented
author wrote write written
win winner won
born birthplace birth
difference differ different differences
cost price costs prices
"""

PLACES_AND_TONGUES = """
afghanistan albania algeria america american arabic argentina armenia asia africa athens australia
austria azerbaijan bangladesh barcelona beijing belgium berlin bolivia boston brazil britain british
brussels budapest bulgaria cairo california cambodia canada catalan chicago chile china chinese
colombia copenhagen croatia croatian cuba cyprus czech danish delhi denmark dubai dublin dutch egypt
english england estonia ethiopia europe finland finnish florida france french geneva georgia german
germany ghana greece greek hamburg hebrew helsinki hindi hungarian hungary iceland india indian
indonesia iran iraq ireland irish israel istanbul italian italy jamaica japan japanese jordan kenya
korea korean kuwait kyiv kiev latin latvia lebanon libya lisbon lithuania london luxembourg lyon
madrid malaysia malta mandarin mexico milan moscow morocco mumbai munich nepal netherlands nigeria
norway norwegian oslo pakistan panama paris peru philippines poland polish portugal portuguese
prague qatar rome romania romanian russia russian santiago scotland serbia seville shanghai
singapore slovakia slovenia somalia spain spanish stockholm sudan swahili sweden swedish switzerland
sydney syria taiwan tamil texas thai thailand tokyo toronto tunisia turkey turkish uganda ukraine
ukrainian urdu venezuela venice vienna vietnam vietnamese wales warsaw welsh yemen zimbabwe zurich
python java javascript typescript ruby rust golang kotlin swift php perl scala haskell linux windows
macos ubuntu debian fedora android iphone ios facebook instagram twitter whatsapp telegram tiktok
youtube netflix spotify amazon google microsoft apple samsung gmail outlook excel github gitlab
docker kubernetes mysql postgresql sqlite mongodb redis react angular vue django flask numpy pandas
pytorch tensorflow visa mastercard paypal
"""

# What stands after one of these plays a part that another word cannot take over.
PREPOSITIONS = """
from to into in on by than before after for with without against over under per versus of von nach
zu aus vor für de a à en da para por van naar из в на
"""
JOINS = "and or & und oder et ou y o e between vs versus"
COURTESY = "please kindly hi hello hey thanks thank bitte danke por favor merci"
MEASURES = """
much many long old far big tall high deep fast often soon large heavy wide hot cold good bad hard
difficult expensive likely safe strong close accurate common important dangerous healthy effective
rich
"""
AUXILIARIES = "is are was were do does did has have had will would should can could may am must"
MANNERS = "way ways method best steps procedure like do"
TITLES = "mr mrs ms dr prof st no vs"
DATE_LEADS = "in on im am en el since until by this last"
